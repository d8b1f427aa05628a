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
    """The compiler. A machine without one skips; where ``FLASHINFER_TEST_REQUIRE_NVCC=1`` promises one, it fails."""
    found = find_nvcc()
    if found is None:
        refuse = pytest.fail if os.environ.get("FLASHINFER_TEST_REQUIRE_NVCC") == "1" else pytest.skip
        refuse(NO_NVCC)
    return found


@pytest.fixture
def hopper(nvcc, monkeypatch, tmp_path) -> None:
    """An empty cache; the target is Hopper, whatever GPU is here."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-O0")  # host code in half the time; only device code is judged
    monkeypatch.setattr(current_compilation_context, "_known", None)
