# SPDX-License-Identifier: Apache-2.0
"""No circle of imports: each module can be read, and imported, after those that it names.

Imports in the bodies of functions and those for type checkers count too, because readers follow them.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from .tree import ROOT


def module_files(folder: str) -> dict[str, Path]:
    paths = (path for path in (ROOT / folder).rglob("*.py") if "data" not in path.parts)
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def imported(module: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of ``known`` that a file imports. A name that is a submodule counts as the submodule."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if not isinstance(node, ast.ImportFrom):
            continue
        base = package[: len(package) - node.level + 1] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        names = [f"{source}.{alias.name}" for alias in node.names]
        found |= {name if name in known else source for name in names}
    return (found & known.keys()) - {module}


def check(graph: dict[str, set[str]]) -> None:
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize("folder", ["flashinfer", "benchmarks", "examples"])
def test_imports_have_no_circle(folder):
    known = module_files(folder)
    if folder != "flashinfer":  # scripts: their folder is on the path
        known = {name.removeprefix(f"{folder}."): path for name, path in known.items()}
    graph = {module: imported(module, path, known) for module, path in known.items()}
    assert any(graph.values())
    check(graph)


def test_a_circle_is_found(tmp_path):
    """Check that an import in a function closes a circle, and one of a submodule by its package."""
    files = {"p": "", "p.a": "from . import b", "p.b": "def f():\n    from .a import x\n"}
    known = {}
    for name, text in files.items():
        known[name] = tmp_path / ("__init__.py" if name == "p" else f"{name[2:]}.py")
        known[name].write_text(text)
    with pytest.raises(pytest.fail.Exception, match=r"p\.a <- p\.b|p\.b <- p\.a"):
        check({module: imported(module, path, known) for module, path in known.items()})
