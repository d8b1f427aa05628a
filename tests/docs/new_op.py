# SPDX-License-Identifier: Apache-2.0
"""A copy of the tree in which docs/adding_an_op.md has been followed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from ..packaging.tree import copy_tree
from .documents import ROOT

PAGE = ROOT / "docs" / "adding_an_op.md"
FILES = ROOT / "examples" / "new_op"


def make_tree(target: Path) -> Path:
    """Copy the tree, add the files that the page shows, and make the edits of existing files that it lists."""
    tree = copy_tree(target)
    (tree / "tests" / "trace").mkdir(parents=True)
    for name in ("__init__.py", "conftest.py", "lanes.py", "trace/__init__.py", "trace/example.py"):
        shutil.copy(ROOT / "tests" / name, tree / "tests" / name)
    shutil.copytree(FILES, tree, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    apply_edits(tree)
    return tree


def apply_edits(tree: Path) -> None:
    """Insert each added line of the page's ``diff`` block behind the line that precedes it there."""
    (block,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.S)
    path, before = tree, ""
    for line in block.splitlines():
        if line.startswith("--- "):
            path = tree / line[4:]
        elif line.startswith("+"):
            text = path.read_text()
            assert text.count(f"{before}\n") == 1, f"{path.name}: {before!r} must occur once"
            path.write_text(text.replace(f"{before}\n", f"{before}\n{line[1:]}\n"))
        else:
            before = line[1:]
