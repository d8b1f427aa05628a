# SPDX-License-Identifier: Apache-2.0
"""The repository as the packaging tests see it."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Enough to build from. Tests never build in the checkout itself: it may be installed and in use.
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
    """A clean checkout of what the build reads: no caches, no links of an editable install, no git."""
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
    """Path -> content of every file below ``folder``; bytecode caches do not count."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
