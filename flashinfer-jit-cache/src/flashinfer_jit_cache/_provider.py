# SPDX-License-Identifier: Apache-2.0
"""Pre-built modules of flashinfer-python for one CUDA architecture, which flashinfer-jit-cache finds by itself."""

from pathlib import Path

from ._version import __version__ as __version__

__all__ = ["get_jit_cache_dir"]


def get_jit_cache_dir() -> str:
    """Return the folder of the modules: ``<name>/<name>.so``, and ``index.json``."""
    return str(Path(__file__).resolve().parent / "jit_cache")
