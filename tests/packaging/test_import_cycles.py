# SPDX-License-Identifier: Apache-2.0
"""No circle of imports: each module can be read, and imported, after those that it names.

Imports in the bodies of functions do not count. Those for type checkers do, because readers follow them.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Iterator

import pytest

from .tree import ROOT


def module_files(folder: str) -> dict[str, Path]:
    paths = (path for path in (ROOT / folder).rglob("*.py") if "data" not in path.parts)
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Return the import statements that run when the module does."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from statements(node)


def imported(module: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of ``known`` that a file imports. A name that is a submodule counts as the submodule."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        base = package[: len(package) - node.level + 1] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        names = [f"{source}.{alias.name}" for alias in node.names]
        found |= {name if name in known else source for name in names}
    return (found & known.keys()) - {module}


@pytest.mark.parametrize("folder", ["flashinfer", "benchmarks", "examples"])
def test_imports_have_no_circle(folder):
    known = module_files(folder)
    graph = {module: imported(module, path, known) for module, path in known.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
