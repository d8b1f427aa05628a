# SPDX-License-Identifier: Apache-2.0
"""Pins of the engines resolve to this package: pip is asked, with wheels built from this tree and no index."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.parser import Parser

import pytest
from packaging.requirements import Requirement

from .tree import ROOT, build

VERSION = (ROOT / "version.txt").read_text().strip()
RELEASE = ".".join(VERSION.split(".")[:3])
#: Requirements of the published wheels, by the version that a build of this tree must have for them.
PINS = {
    "0.7.2.post1": ("vllm 0.33.0", "flashinfer-python==0.7.2.post1"),
    "0.7.2": ("sglang 0.5.23", "flashinfer_python[cu13]==0.7.2"),
}
TVM_FFI = "0.1.11"  # both engines pin it


@pytest.fixture(scope="module")
def wheels(tree, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pins")
    return {version: build(tree, "build_wheel", folder, {"version": version}) for version in PINS}


@pytest.mark.skipif(RELEASE != "0.7.2", reason=f"the pins are those of 0.7.2, this tree has level {RELEASE}")
@pytest.mark.parametrize("version", PINS)
def test_pip_takes_our_wheel(wheels, version):
    engine, pin = PINS[version]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps", "--ignore-installed"]
    folder = str(wheels[version].parent)  # both versions lie there: pip chooses by the pin
    done = subprocess.run([*command, "--find-links", folder, pin], capture_output=True, text=True)
    assert done.returncode == 0, f"{engine}: {done.stderr}"
    assert f"Would install flashinfer-python-{version}\n" in done.stdout + "\n"


@pytest.mark.skipif(RELEASE != "0.7.2", reason=f"the pins are those of 0.7.2, this tree has level {RELEASE}")
def test_requirements_of_our_wheel_hold_with_those_of_the_engines(wheels):
    with zipfile.ZipFile(wheels["0.7.2"]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(wheel.read(name).decode())
    asked = {Requirement(text).name: Requirement(text) for text in metadata.get_all("Requires-Dist") or ()}
    assert asked["apache-tvm-ffi"].specifier.contains(TVM_FFI)
    assert {"cu12", "cu13"} <= set(metadata.get_all("Provides-Extra") or ())
