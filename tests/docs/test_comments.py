# SPDX-License-Identifier: Apache-2.0
"""Files that comments and docstrings name exist."""

from __future__ import annotations

import re
from pathlib import Path

from .documents import ROOT

FOLDERS = ("flashinfer", "csrc", "include", "benchmarks", "scripts", "examples", "tests")
PYTHON, CPP = {".py"}, {".h", ".cuh", ".cu", ".cpp", ".jinja"}
NAME = re.compile(r"(?<![\w./<{*-])(?:[\w.-]+/)*[\w-]+\.(?:pyi?|cuh|cu|cpp|h|jinja|md|toml)(?![\w*{(.-]|\.\w)")

#: Files of users, what programs here write, and the placeholder ``op`` of jit/codegen.py.
ELSEWHERE = {
    *("serve.py", "index.md"),
    *("_customize_config.jinja", "_kernels.jinja", "csrc/op.cu", "csrc/op_jit_binding.cu", "csrc/op_kernels.jinja"),
    *("include/flashinfer/op.cuh", "op_cpu.h"),
}


_DOCSTRING = re.compile(r'^ *[rf]?"""(.*?)"""', re.DOTALL | re.MULTILINE)
_COMMENT = {True: re.compile(r"(?:^|\s)#(.*)"), False: re.compile(r"//+(.*)")}


def texts(path: Path) -> list[str]:
    """Return comments and docstrings. (``tokenize`` and ``ast`` find the same in ten times the time.)"""
    source, is_python = path.read_text(), path.suffix in PYTHON
    return _COMMENT[is_python].findall(source) + (_DOCSTRING.findall(source) if is_python else [])


def files() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in PYTHON | CPP]
    return [path for path in found if not {"data", "__pycache__"} & set(path.parts)]


KNOWN = {f"/{path.relative_to(ROOT)}" for path in files()}
KNOWN |= {f"/{p.relative_to(ROOT)}" for glob in ("*.md", "*.toml", "*.py", "docs/**/*.md") for p in ROOT.glob(glob)}
ENDS = {known[i + 1 :] for known in KNOWN for i, letter in enumerate(known) if letter == "/"}


def exists(name: str) -> bool:
    """Return True if a file of the repository has this name, or a path that ends with it."""
    return name.removeprefix("../") in ENDS or name in ELSEWHERE


def test_named_files_exist():
    missing = {}
    for path in files():
        if path.is_relative_to(ROOT / "tests"):  # texts of programs there name files that the tests write
            continue
        unknown = {name for text in texts(path) for name in NAME.findall(text) if not exists(name)}
        if unknown:
            missing[str(path.relative_to(ROOT))] = sorted(unknown)
    assert missing == {}


def test_a_wrong_name_is_found(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text('"""See attend.py and attention/run.py."""\nx = "gone.py"  # as in csrc/never.cu, not csrc/*.cu\n')
    assert {name for text in texts(path) for name in NAME.findall(text) if not exists(name)} == {
        "attend.py",
        "csrc/never.cu",
    }
