# SPDX-License-Identifier: Apache-2.0
"""C++ programs of examples/, built by CMake for the CPU: one loads a compiled module, one includes the headers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import tvm_ffi

from flashinfer.jit.activation import gen_activation_modules

from .documents import ROOT

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(example: str, folder: Path, *options: str) -> None:
    run("cmake", "-S", ROOT / "examples" / example, "-B", folder, *options)
    run("cmake", "--build", folder)


def test_program_loads_a_module(tmp_path):
    """Check that neither Python nor torch is linked."""
    (folder,) = tvm_ffi.__path__
    build("cpp_module", tmp_path, f"-DTVM_FFI_DIR={folder}")
    libraries = run("ldd", tmp_path / "silu")
    assert "libtvm_ffi.so" in libraries and "torch" not in libraries and "libpython" not in libraries
    (spec,) = gen_activation_modules("cpu")
    spec.build()
    assert "largest error" in run(tmp_path / "silu", spec.get_library_path())


def test_program_includes_the_headers(tmp_path):
    build("header_only", tmp_path, "-DWITH_CUDA=OFF")
    assert "largest error" in run(tmp_path / "silu_cpu")
