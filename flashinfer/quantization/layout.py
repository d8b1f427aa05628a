# SPDX-License-Identifier: Apache-2.0
"""Layouts of block scales, and the sizes they pad a scale matrix to."""

from __future__ import annotations

import enum
from typing import Optional

from .._runtime.errors import ArgumentError
from .._runtime.integer_math import round_up

__all__ = ["SfLayout"]


class SfLayout(enum.IntEnum):
    """Order of the scale factors of a matrix; the numbers are those of ``ScaleLayout`` in mx_quantization.h.

    The swizzled layouts are tiles of 128 x 4 or 8 x 4 scales, padded with zeros; linear is row by row.
    """

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


_TILE_ROWS = {SfLayout.layout_128x4: 128, SfLayout.layout_8x4: 8, SfLayout.layout_linear: 1}


def scale_count(rows: int, cols: int, layout: SfLayout) -> int:
    """Return the number of scales in a buffer for ``rows`` x ``cols`` scales, padding included."""
    return round_up(rows, _TILE_ROWS[layout]) * (cols if layout == SfLayout.layout_linear else round_up(cols, 4))


def chosen_layout(op: str, is_sf_swizzled_layout: bool, sf_swizzle_layout: Optional[SfLayout]) -> SfLayout:
    """Return the requested layout: the named one, or without a name the one that the flag selects."""
    if sf_swizzle_layout is None:
        return SfLayout.layout_128x4 if is_sf_swizzled_layout else SfLayout.layout_linear
    try:
        return SfLayout(sf_swizzle_layout)
    except ValueError:
        raise ArgumentError(f"{op}: the layout must be an SfLayout, got {sf_swizzle_layout!r}") from None
