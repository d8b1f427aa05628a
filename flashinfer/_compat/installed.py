# SPDX-License-Identifier: Apache-2.0
"""Versions of optional packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from .._runtime.errors import LibraryError

__all__ = ["get_cuda_python_version", "has_cuda_cudart", "version_at_least"]


def version_at_least(version: str, base_version: str) -> bool:
    """Return True if ``version`` is at least ``base_version``; builds of 2.8 such as ``2.8.0a0+cu129`` count as 2.8."""
    from packaging.version import parse

    return parse(parse(version).base_version) >= parse(base_version)


def has_cuda_cudart() -> bool:
    """Return True if cuda-python's runtime bindings can be imported, under their present or their former name."""
    try:
        return any(importlib.util.find_spec(name) is not None for name in ("cuda.bindings.runtime", "cuda.cudart"))
    except ModuleNotFoundError:  # no package ``cuda`` at all
        return False


def get_cuda_python_version() -> str:
    """Return the version of cuda-python; ``LibraryError`` without it."""
    try:
        return importlib.metadata.version("cuda-python")
    except importlib.metadata.PackageNotFoundError:
        raise LibraryError("cuda-python is not installed: pip install cuda-python") from None
