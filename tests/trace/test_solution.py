# SPDX-License-Identifier: Apache-2.0
"""Data models of kernels written for a definition."""

from __future__ import annotations

import dataclasses

import pytest

from flashinfer._runtime.errors import ArgumentError
from flashinfer.trace import BuildSpec, Solution, SourceFile, SupportedBindings, SupportedLanguages

SPEC = BuildSpec("cuda", ["H200"], "main.cu::run", binding="tvm-ffi")


def test_words_become_enums():
    assert SPEC.language is SupportedLanguages.CUDA
    assert SPEC.binding is SupportedBindings.TVM_FFI
    assert not SPEC.destination_passing_style
    with pytest.raises(ValueError, match="fortran"):
        BuildSpec("fortran", [], "main.f90::run")


def test_models_are_frozen():
    solution = Solution("fast", "rmsnorm_h4096", "me", SPEC, [SourceFile("main.cu", "...")])
    with pytest.raises(dataclasses.FrozenInstanceError):
        solution.name = "faster"
    assert dataclasses.replace(solution, name="faster").definition == "rmsnorm_h4096"


def test_entry_point():
    with pytest.raises(ArgumentError, match="entry_point must be 'file::function', got"):
        BuildSpec("cuda", [], "main.cu")
    with pytest.raises(ArgumentError, match=r"entry_point must name one of the sources .*, got 'main.cu'"):
        Solution("fast", "rmsnorm_h4096", "me", SPEC, [SourceFile("other.cu", "...")])
