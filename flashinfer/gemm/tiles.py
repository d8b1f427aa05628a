# SPDX-License-Identifier: Apache-2.0
"""Tiles of the SM90 products as tactics of the autotuner: ``(tile, cluster, share_b)``.

``tile`` counts the kernels of a module (``tiles_of`` in jit/gemm/core.py). ``cluster`` blocks share an operand, weights
if ``share_b``; of a swapped tile, which has weights on the M side, they split K. The rule of gemm/sm90/choose.h
estimates which is fastest; trials on the machine itself know.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from .._runtime.dispatch import use_pdl
from ..jit.gemm import W4_TILES, tiles_of
from .launch import BATCHED, gemm_sm90, product

__all__ = ["BY_RULE", "product_with_tile", "tile_of", "tile_tactics", "w4_tactics"]

#: Tactic of the rule.
BY_RULE = 0

_K_BLOCK_BYTES = 128
_W4_K_BLOCK = 128  # elements
_FEWEST_ROWS = 32  # with fewer tokens, tiles with tokens on the M side are mostly padding
_MOST_SWAPPED_ROWS = 256


def tile_tactics(kind: str, m: int, k: int, most_rows: int = 0) -> list[tuple[int, int, bool]]:
    """Return the tiles worth a trial for ``m`` tokens and sums of ``k`` elements, by the kind of module.

    Groups of different sizes have ``m`` tokens on average, and up to ``most_rows``.
    """
    k_blocks = max(1, k * (2 if kind in ("bf16", "fp16") else 1) // _K_BLOCK_BYTES)
    most_rows = max(m, most_rows)
    tactics = []
    for i, tile in enumerate(tiles_of(kind)):
        if not tile.swapped:
            tactics += [(i, 1, False), (i, 2, False), (i, 2, True)] if most_rows >= _FEWEST_ROWS else []
        elif m <= _MOST_SWAPPED_ROWS and m / 2 <= tile.block_m < 2 * max(8, most_rows):
            most = min(tile.most_blocks, k_blocks)
            tactics += [(i, split, False) for split in (1, 2, 3, 4, 6, 8) if split <= most]
    return tactics


def w4_tactics(rows: int, k: int) -> list[tuple[int, int]]:
    """Return the tiles for four-bit weights that are worth a trial, and the blocks that split K of each.

    Experts have ``rows`` tokens on average, and up to four times as many; ``k`` is the number of elements of a sum.
    """
    largest = max(tile.tokens for tile in W4_TILES)
    tactics = []
    for i, tile in enumerate(W4_TILES):
        if min(rows, largest) / 2 <= tile.tokens < 8 * max(2, rows):
            most = min(tile.most_blocks, k // _W4_K_BLOCK)
            tactics += [(i, split) for split in (1, 2, 4, 8) if split <= most]
    return tactics


def tile_of(tactic: Any) -> Optional[tuple[int, int, bool]]:
    """Return the tile of a tactic, which is a list if it was read from a file; None for the tactics of the rule."""
    if not isinstance(tactic, (tuple, list)) or len(tactic) != 3:
        return None
    return int(tactic[0]), int(tactic[1]), bool(tactic[2])


def product_with_tile(
    tactic: Any,
    kind: str,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: Optional[torch.Tensor] = None,
    b_scale: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    enable_pdl: Optional[bool] = None,
) -> None:
    """Write ``a @ b.mT + bias`` to ``out`` with the tile of a tactic; by the rule where it is none, or not taken."""
    tile = tile_of(tactic)
    if tile is not None:
        operands = (out, a, b, a_scale, b_scale, bias, None, None, BATCHED, 1, 0)
        # 0, 0: the order of tiles is that of the rule, and all SMs take part.
        if gemm_sm90[kind](*operands, *tile, 0, 0, use_pdl(a, enable_pdl), False):
            return
    product(out, a, b, a_scale=a_scale, b_scale=b_scale, bias=bias, enable_pdl=enable_pdl)
