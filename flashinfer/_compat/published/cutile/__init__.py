# SPDX-License-Identifier: Apache-2.0
"""Probe of the package ``cuda.tile``. No kernel here needs it."""

from flashinfer.cutile.cutile_common import is_cuda_tile_available

__all__ = ["is_cuda_tile_available"]
