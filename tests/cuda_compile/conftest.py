# SPDX-License-Identifier: Apache-2.0
"""Tests that need nvcc but no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashinfer.jit.context import current_compilation_context
from flashinfer.jit.cpp_ext import find_nvcc
from flashinfer.jit.toolchain import NO_NVCC


@pytest.fixture(scope="session")
def nvcc() -> Path:
    """Return the compiler. Without one the test skips, or fails if ``FLASHINFER_TEST_REQUIRE_NVCC=1`` is set."""
    found = find_nvcc()
    if found is None:
        refuse = pytest.fail if os.environ.get("FLASHINFER_TEST_REQUIRE_NVCC") == "1" else pytest.skip
        refuse(NO_NVCC)
    return found


@pytest.fixture
def hopper(nvcc, monkeypatch, tmp_path) -> None:
    """Set an empty cache and Hopper as the target, whatever GPU is present."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-O0")  # halves the host compile time; only device code is checked
    monkeypatch.setattr(current_compilation_context, "_known", None)
