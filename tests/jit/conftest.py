# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the build-system tests: an empty cache, a clean environment and a new registry for each test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashinfer.jit import env as jit_env
from flashinfer.jit import jit_spec_registry
from flashinfer.jit.context import current_compilation_context

from .toolbox import Workshop, fake_toolkit


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in os.environ:
        if name.startswith("FLASHINFER_") or name in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "MAX_JOBS"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "base"))
    monkeypatch.setattr(jit_spec_registry, "_specs", {})
    monkeypatch.setattr(current_compilation_context, "_known", None)
    jit_env._warn_fallback.cache_clear()
    jit_env._warn_companion.cache_clear()
    jit_env.warn_untrusted.cache_clear()


@pytest.fixture
def workshop(tmp_path, monkeypatch) -> Workshop:
    made = Workshop(tmp_path)
    monkeypatch.setenv("CXX", str(made.cxx))
    return made


@pytest.fixture
def toolkit(tmp_path, monkeypatch) -> Path:
    """Return a CUDA toolkit whose nvcc is the host compiler; one target is set."""
    root = fake_toolkit(tmp_path / "cuda")
    monkeypatch.setenv("FLASHINFER_NVCC", str(root / "bin" / "nvcc"))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    return root
