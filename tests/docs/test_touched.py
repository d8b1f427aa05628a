# SPDX-License-Identifier: Apache-2.0
"""``make quick`` runs the tests of the files that differ from main."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from .documents import ROOT


@pytest.fixture
def touched(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "touched", raising=False)
    spec = importlib.util.spec_from_file_location("touched", ROOT / "scripts" / "touched.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tests_of_files(touched):
    by_file = touched.tests_by_file()
    for path, expected in {
        "csrc/norm.cu": {"tests/norm"},
        "include/flashinfer/sampling_cpu.h": {"tests/sampling"},
        "csrc/scale.cu": {"tests/test_scale.py"},
        "csrc/batch_decode.cu": {"tests/attention"},
        "flashinfer/jit/core.py": {"tests/jit"},
        "flashinfer/autotuner/autotuner.py": {"tests/autotuner"},
        "tests/rope/inputs.py": {"tests/rope"},
        "tests/rope/test_rope.py": {"tests/rope/test_rope.py"},
        "docs/glossary.md": {"tests/docs"},
        "Makefile": {"tests/test_tiny.py"},
    }.items():
        assert touched.tests_of(path, by_file) == expected, path


def test_files_that_differ(touched, monkeypatch, capsys):
    """Check that deleted files and helpers that are not tests are left out, and the smoke test is always run."""
    monkeypatch.setattr(
        touched, "changed", lambda revision: ["tests/gone/test_gone.py", "tests/tensors.py", "csrc/rope.cu"]
    )
    monkeypatch.setattr(sys, "argv", ["touched.py"])
    touched.main()
    assert capsys.readouterr().out.split() == ["tests/rope", "tests/test_tiny.py"]
