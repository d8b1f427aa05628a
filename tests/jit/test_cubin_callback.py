# SPDX-License-Identifier: Apache-2.0
"""A C++ library that asks Python for kernel binaries through ``flashinfer/cubin_loader.h``."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess

import pytest

from flashinfer.jit import cubin_loader
from flashinfer.jit import env as jit_env

CONTENT = b"machine\0code"  # binaries hold zero bytes
SHA = hashlib.sha256(CONTENT).hexdigest()
SOURCE = """
#include <cstring>
#include <flashinfer/cubin_loader.h>

extern "C" int copy(const char* path, const char* sha256, char* out) {
  try {
    const std::string cubin = flashinfer::GetCubin(path, sha256);
    std::memcpy(out, cubin.data(), cubin.size());
    return static_cast<int>(cubin.size());
  } catch (const std::exception& error) {
    std::strcpy(out, error.what());
    return -1;
  }
}
"""


@pytest.fixture
def library(tmp_path):
    (tmp_path / "asker.cc").write_text(SOURCE)
    path = tmp_path / "asker.so"
    include = f"-I{jit_env.FLASHINFER_INCLUDE_DIR}"
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    subprocess.run(
        [compiler, "-std=c++17", "-shared", "-fPIC", include, str(path.with_suffix(".cc")), "-o", str(path)], check=True
    )
    return path


def test_a_library_gets_its_kernels(library, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(tmp_path / "cubins"))
    (tmp_path / "cubins").mkdir()
    (tmp_path / "cubins" / "a.cubin").write_bytes(CONTENT)
    copy, out = ctypes.CDLL(str(library)).copy, ctypes.create_string_buffer(256)
    assert copy(b"a.cubin", SHA.encode(), out) == -1 and b"setup_cubin_loader must be called" in out.value
    cubin_loader.setup_cubin_loader(str(library))
    assert copy(b"a.cubin", SHA.encode(), out) == len(CONTENT) and out.raw[: len(CONTENT)] == CONTENT
    assert copy(b"b.cubin", SHA.encode(), out) == -1 and b"b.cubin with SHA-256" in out.value
    assert "b.cubin cannot be loaded" in caplog.text


def test_load_cubin(tmp_path):
    path = tmp_path / "a.cubin"
    path.write_bytes(CONTENT)
    assert cubin_loader.load_cubin(str(path), SHA) == CONTENT
    assert cubin_loader.load_cubin(str(path), "0" * 64) == b"" == cubin_loader.load_cubin(str(tmp_path / "no"), SHA)
    assert cubin_loader.verify_cubin(cubin_path=str(path), expected_sha256=SHA)
    assert ctypes.string_at(cubin_loader.convert_to_ctypes_char_p(CONTENT), len(CONTENT)) == CONTENT
