# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime of a machine without a toolkit: pip's ``nvidia`` packages, or one line that names the package."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from flashinfer.jit.cuda_runtime import load_missing_cudart

from .toolbox import REAL_CXX


def fake_runtime(folder: Path, major: int) -> Path:
    """Build an empty ``libcudart.so.<major>``; no release of CUDA has that number, so nothing has loaded it."""
    folder.mkdir(parents=True)
    name = f"libcudart.so.{major}"
    command = [REAL_CXX, "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{name}", "-o", str(folder / name)]
    subprocess.run(command, check=True, env={"PATH": os.defpath})
    return folder / name


def needing(workshop, runtime: Path):
    """Build a module that needs the runtime, and knows no folder to find it in."""
    flags = ["-Wl,--no-as-needed", f"-L{runtime.parent}", f"-l:{runtime.name}"]
    spec = workshop.spec("op", extra_ldflags=flags)
    spec.build()
    return spec


def test_runtime_of_a_pip_package(workshop, tmp_path, monkeypatch):
    runtime = fake_runtime(tmp_path / "site" / "nvidia" / "cu97" / "lib", 97)
    spec = needing(workshop, runtime)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    compiled = len(workshop.calls)
    assert spec.build_and_load().answer() == 42
    assert len(workshop.calls) == compiled, "the module was built again, although only its runtime was missing"


def test_runtime_that_is_not_installed(workshop, tmp_path):
    spec = needing(workshop, fake_runtime(tmp_path / "elsewhere", 98))
    with pytest.raises(RuntimeError) as caught:
        spec.build_and_load()
    assert str(caught.value).startswith("libcudart.so.98 is neither loaded by torch nor installed: `pip install ")
    assert "\n" not in str(caught.value)


def test_other_failures_are_left_alone():
    assert not load_missing_cudart("libfoo.so.1: cannot open shared object file: No such file or directory")
