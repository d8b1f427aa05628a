# SPDX-License-Identifier: Apache-2.0
"""Layout of flashinfer/: its top level is a table of contents, private and compatibility modules have their folders."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

import flashinfer

from .tree import ROOT

PACKAGE = ROOT / "flashinfer"
GENERATED = {"__pycache__", "_build_meta.py", "data"}
LOADED_BY_PATH = {"gdn_kernels"}  #: published re-exports that programs load by the path of their file
PUBLISHED = PACKAGE / "_compat" / "published"
#: Folders whose modules are paths of the package of the same name: ``flashinfer/moe_ep`` adds its folder to its path.
PARTS = {"comm", "jit", "moe_ep"}
PATHS = sorted(p.stem for p in PUBLISHED.iterdir() if p.stem not in {"__init__", "__pycache__", *PARTS})


def test_the_top_level_is_short():
    entries = sorted(path.name for path in PACKAGE.iterdir() if path.name not in GENERATED | LOADED_BY_PATH)
    assert len(entries) <= 50, f"{entries}: private modules belong in _runtime, published re-exports in _compat"


@pytest.mark.parametrize("name", PATHS)
def test_published_paths(name):
    module = importlib.import_module(f"flashinfer.{name}")
    assert module.__name__ == f"flashinfer.{name}" and getattr(flashinfer, name) is module
    assert PUBLISHED in (ROOT / module.__file__).parents


def test_private_modules_are_listed():
    """Check that the docstring of _runtime lists its modules; a newcomer reads it first."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / "_runtime" / "__init__.py").read_text()))
    table = docstring.split("\n===")[1]
    listed = [line.split()[0] for line in table.splitlines()[1:]]
    assert sorted(listed) == sorted(path.stem for path in (PACKAGE / "_runtime").glob("[!_]*.py"))


def test_sampling_headers_are_listed():
    """Check that the table on top of sampling.cuh has each file of sampling/ once, and that they stay few."""
    headers = ROOT / "include" / "flashinfer"
    table = (headers / "sampling.cuh").read_text().split("#pragma once")[0]
    listed = re.findall(r"^// +sampling/(\w+\.c?u?h)  ", table, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (headers / "sampling").iterdir())
    assert len(listed) <= 24, "join halves of one concept before adding a file"
