# SPDX-License-Identifier: Apache-2.0
"""Probe of the package ``cuda.tile``. (The published name of the module.)"""

from __future__ import annotations

import importlib.util

__all__ = ["is_cuda_tile_available"]


def is_cuda_tile_available() -> bool:
    """Return True if the package ``cuda.tile`` is installed."""
    try:
        return importlib.util.find_spec("cuda.tile") is not None
    except ModuleNotFoundError:  # no package ``cuda`` at all
        return False
