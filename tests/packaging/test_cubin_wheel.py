# SPDX-License-Identifier: Apache-2.0
"""The package flashinfer-cubin, built with a compiler that writes its command line, and installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .tree import ROOT

VERSION = (ROOT / "version.txt").read_text().strip()

NVCC = """#!/bin/sh
[ "$1" = --version ] && echo "release 13.0, V13.0.1" && echo "Build 1" && exit
[ "$1" = --dryrun ] && exit
for word in "$@"; do last=$word; done
echo "$*" > "$last"
"""

PROGRAM = """
import flashinfer_cubin
from flashinfer import artifacts

names = flashinfer_cubin.list_cubins()
assert names and all(name.endswith(".sm_90a.cubin") for name in names), names
assert "-cubin" in open(flashinfer_cubin.get_cubin_path(names[0])).read()
assert flashinfer_cubin.__git_version__ and str(flashinfer_cubin.CUBIN_DIR) == flashinfer_cubin.get_cubin_dir()
assert str(artifacts.FLASHINFER_CUBIN_DIR) == flashinfer_cubin.get_cubin_dir()
assert artifacts.get_artifacts_status() == tuple((name, True) for name in names)
artifacts.download_artifacts()
"""


@pytest.fixture
def site(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path / "out")]
    env = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_")}
    env |= {
        "FLASHINFER_NVCC": str(nvcc),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "base"),
    }
    words = [*command, "-Ccubins=--family concat_ops", str(ROOT / "flashinfer-cubin")]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "out").iterdir()
    assert wheel.name == f"flashinfer_cubin-{VERSION}-py3-none-any.whl"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(tmp_path / "site"), str(wheel)], check=True, capture_output=True)
    return tmp_path / "site"


def test_installed_cubins(site, tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER_")}
    env |= {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "base2"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    before = sorted(site.rglob("*"))
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(site.rglob("*")) == before
