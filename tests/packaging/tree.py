# SPDX-License-Identifier: Apache-2.0
"""The repository as the packaging tests use it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[2]

# Files to build from. Tests never build in the checkout itself: it may be installed and in use.
_TOP_FILES = (
    "build_backend.py",
    "LICENSE",
    "MANIFEST.in",
    "pyproject.toml",
    "README.md",
    "requirements.txt",
    "version.txt",
)
_TOP_FOLDERS = ("3rdparty", "csrc", "flashinfer", "include")


def copy_tree(target: Path) -> Path:
    """Copy the files that the build reads: no caches, no links of an editable install, no git."""
    target.mkdir(parents=True)
    for name in _TOP_FILES:
        shutil.copy2(ROOT / name, target / name)
    for name in _TOP_FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignore)
    shutil.rmtree(target / "flashinfer" / "data", ignore_errors=True)
    (target / "flashinfer" / "_build_meta.py").unlink(missing_ok=True)
    return target


def listing(folder: Path) -> dict[str, bytes]:
    """Return path -> content of every file below ``folder``, without bytecode caches."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def build(tree: Path, hook: str, out: Path, settings: Optional[dict] = None, **variables: str) -> Path:
    """Call one PEP 517 hook as a front end does: in a new process whose working directory is the tree."""
    out.mkdir(parents=True, exist_ok=True)
    code = f"import build_backend; print('built:' + build_backend.{hook}({str(out)!r}, {settings!r}))"
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / re.findall(r"^built:(.+)$", done.stdout, re.M)[0]
