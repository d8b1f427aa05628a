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


def test_parts_of_a_solution():
    made = Solution.from_dict(
        {
            "name": "mine",
            "definition": "rmsnorm_h4096",
            "author": "me",
            "spec": {"language": "triton", "entry_point": "pkg/main.py::run", "target_hardware": ["H200"]},
            "sources": [{"path": "pkg/util.py", "content": ""}, {"path": "pkg/main.py", "content": "def run(): pass"}],
        }
    )
    assert (made.entry_file, made.entry_symbol) == ("pkg/main.py", "run")
    assert made.entry_source.content == "def run(): pass"
    assert made.spec.is_python_family and BuildSpec.from_dict(made.spec.to_dict()) == made.spec
    assert not BuildSpec("cuda", (), "a.cu::f").is_python_family
    assert Solution.from_dict(made.to_dict()) == made
    other = Solution.from_dict({**made.to_dict(), "name": "other", "author": "you"})
    assert other.hash() == made.hash() and len(made.hash()) == 64
    changed = Solution.from_dict({**made.to_dict(), "definition": "rmsnorm_h8192"})
    assert changed.hash() != made.hash()
