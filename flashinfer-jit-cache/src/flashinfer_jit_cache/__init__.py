# SPDX-License-Identifier: Apache-2.0
"""Pre-built modules of flashinfer-python, which finds them by itself."""

from pathlib import Path

from ._version import __version__ as __version__

__all__ = ["get_jit_cache_dir"]


def get_jit_cache_dir() -> str:
    """Return the folder of the modules: ``<name>/<name>.so``, in a folder for each CPU target, and ``index.json``."""
    return str(Path(__file__).resolve().parent / "jit_cache")
