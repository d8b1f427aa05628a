# SPDX-License-Identifier: Apache-2.0
"""A newcomer who follows docs/adding_an_op.md has an op that works: the page is followed in a copy of the tree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from .documents import ROOT
from .new_op import FILES, PAGE, make_tree


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run Python in the copy, with an empty cache."""
    folder = tmp_path_factory.mktemp("new_op")
    tree = make_tree(folder / "tree")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHINFER_", "PYTEST_"))}
    env |= {"PYTHONPATH": str(tree), "FLASHINFER_WORKSPACE_BASE": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}

    def call(*arguments):
        done = subprocess.run([sys.executable, *arguments], cwd=tree, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call.tree = tree
    return call


def test_its_tests_pass(run):
    assert "15 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cpu", "tests/shift")


def test_its_definition_is_written(run):
    run("tests/trace/example.py", "definitions")
    definition = json.loads((run.tree / "definitions" / "shift_h1024.json").read_text())
    assert definition["name"] == "shift_h1024" and "input.float() + amount" in definition["reference"]


def test_it_is_a_family(run):
    specs = "(s.name for b in ('cpu', 'cuda') for s in gen_family_modules('shift', b))"
    code = f"from flashinfer.aot import *; print(*{specs})"
    assert run("-c", code).split() == ["shift_cpu", "shift"]


def test_every_file_is_shown():
    text = PAGE.read_text()
    files = [path for path in FILES.rglob("*") if path.is_file() and path.stat().st_size and path.suffix != ".pyc"]
    assert [path.name for path in files if f"<!-- code: {path.relative_to(ROOT)} -->" not in text] == []


def test_files_of_an_argument_of_experts():
    """Check that the guide names each file that a constant of an activation is in, and no other."""
    section = PAGE.read_text().partition("## An argument of a layer of experts")[2].partition("\n## ")[0]
    named = re.findall(r"`((?:flashinfer|csrc|include)/[\w/.]+)`", section)
    folders = [ROOT / name for name in ("flashinfer", "csrc", "include")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".h")]
    # fused_moe/cute_dsl checks arguments of published kernels, which are not those of a layer here.
    found = [path.relative_to(ROOT) for path in files if not {"data", "cute_dsl"} & set(path.parts)]
    assert sorted(named) == sorted(str(path) for path in found if "situ_linear_beta" in (ROOT / path).read_text())
    assert len(named) <= 7
