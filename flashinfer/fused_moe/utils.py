# SPDX-License-Identifier: Apache-2.0
"""Buckets of token counts for tuning, random routings, and shapes of FP4 operands with their scales."""

from __future__ import annotations

import functools
import math
from typing import Callable, Optional, Sequence

import torch

from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .._runtime.integer_math import ceil_div, next_positive_power_of_2, round_up
from ..quantization.fp4_quantization import block_scale_interleave

__all__ = [
    "compute_swizzled_sf_shape",
    "get_fp4_shape",
    "get_hybrid_num_tokens_buckets",
    "make_hybrid_bucket_mapper",
    "make_random_topk_ids",
    "map_to_hybrid_bucket",
    "map_to_hybrid_bucket_uncapped",
    "swizzle_sf",
    "unswizzle_sf",
]


def map_to_hybrid_bucket_uncapped(x: int) -> int:
    """Round ``x`` up: to a power of two up to 256, by 256 up to 2048, by 512 up to 4096, then to a power of two."""
    if x <= 256:
        return next_positive_power_of_2(x)
    if x <= 2048:
        return round_up(x, 256)
    return round_up(x, 512) if x <= 4096 else next_positive_power_of_2(x)


def map_to_hybrid_bucket(x: int, max_num_tokens: int) -> int:
    """Apply :func:`map_to_hybrid_bucket_uncapped`, limited to 1 ... ``max_num_tokens``."""
    return max(1, min(map_to_hybrid_bucket_uncapped(x), max_num_tokens))


def get_hybrid_num_tokens_buckets(max_num_tokens: int, min_num_tokens: int = 1) -> tuple[int, ...]:
    """Return the buckets from ``min_num_tokens`` on; ``max_num_tokens`` is the last."""
    if not 1 <= min_num_tokens <= max_num_tokens:
        raise ArgumentError(
            f"get_hybrid_num_tokens_buckets: min_num_tokens must be from 1 to max_num_tokens = {max_num_tokens}, got "
            f"{min_num_tokens}"
        )
    buckets, bucket = [], map_to_hybrid_bucket_uncapped(min_num_tokens)
    while bucket < max_num_tokens:
        buckets.append(bucket)
        bucket = map_to_hybrid_bucket_uncapped(bucket + 1)
    return (*buckets, max_num_tokens)


@functools.cache
def make_hybrid_bucket_mapper(max_num_tokens: int) -> Callable[[int], int]:
    """Return :func:`map_to_hybrid_bucket` for one maximum; the same object at each call."""
    return functools.partial(map_to_hybrid_bucket, max_num_tokens=max_num_tokens)


@explain_type_errors
def make_random_topk_ids(
    num_experts: int,
    num_tokens: int,
    top_k: int,
    device: torch.device,
    generator: Optional[torch.Generator] = None,
) -> torch.Tensor:
    """Choose ``top_k`` different experts for each token: ``(num_tokens, top_k)`` int32."""
    if not 0 <= top_k <= num_experts or num_tokens < 0:
        raise ArgumentError(
            f"make_random_topk_ids: top_k must be from 0 to num_experts and num_tokens at least 0, got {top_k}, "
            f"{num_experts} and {num_tokens}"
        )
    return (
        torch.rand(num_tokens, num_experts, device=device, generator=generator)
        .topk(top_k, dim=1)
        .indices.to(torch.int32)
    )


@explain_type_errors
def compute_swizzled_sf_shape(row: int, col: int) -> tuple[int, int]:
    """Return the rows and columns that a matrix of scales has in the 128 x 4 layout, padding included."""
    return round_up(row, 128), round_up(col, 4)


def _check_matrix(op: str, rows: int, cols: int, scaling_vector_size: int) -> None:
    if min(rows, cols, scaling_vector_size) < 1:
        raise ArgumentError(
            f"{op}: rows, cols and scaling_vector_size must be at least 1, got {rows}, {cols} and {scaling_vector_size}"
        )


@explain_type_errors
def swizzle_sf(sf: torch.Tensor, rows: int, cols: int, scaling_vector_size: int = 16) -> torch.Tensor:
    """Bring the scales of ``(rows, cols)`` elements, or of a batch of such matrices, into the 128 x 4 layout.

    The result is that of :func:`flashinfer.block_scale_interleave`: one dimension, each matrix padded with zeros.
    """
    _check_matrix("swizzle_sf", rows, cols, scaling_vector_size)
    per_matrix = rows * ceil_div(cols, scaling_vector_size)
    if sf.numel() % per_matrix:
        raise ArgumentError(
            f"swizzle_sf: sf must have a multiple of {per_matrix} elements (rows times scales per row), got "
            f"{sf.numel()}"
        )
    return block_scale_interleave(sf.reshape(-1, rows, ceil_div(cols, scaling_vector_size)))


@explain_type_errors
def unswizzle_sf(sf: torch.Tensor, rows: int, cols: int, scaling_vector_size: int = 16) -> torch.Tensor:
    """Undo :func:`swizzle_sf`: return the scales row by row, ``(batch * rows, scales per row)``, without padding."""
    _check_matrix("unswizzle_sf", rows, cols, scaling_vector_size)
    per_row = ceil_div(cols, scaling_vector_size)
    padded_rows, padded_cols = compute_swizzled_sf_shape(rows, per_row)
    if sf.numel() % (padded_rows * padded_cols):
        raise ArgumentError(
            f"unswizzle_sf: sf must have a multiple of {padded_rows * padded_cols} elements (rows padded to "
            f"{padded_rows}, scales per row to {padded_cols}), got {sf.numel()}"
        )
    # Tiles of 128 rows and 4 columns: row r of a tile is at place r % 32, then r / 32.
    tiles = sf.reshape(-1, padded_rows // 128, padded_cols // 4, 32, 4, 4)
    linear = tiles.permute(0, 1, 4, 3, 2, 5).reshape(-1, padded_rows, padded_cols)
    return linear[:, :rows, :per_row].reshape(-1, per_row)


@explain_type_errors
def get_fp4_shape(
    input_shape: Sequence[int], sf_vec_size: int, is_swizzled_layout: bool = True
) -> tuple[list[int], int]:
    """Return the shape of a tensor in FP4, two codes per byte, and the number of its scales."""
    if not input_shape or sf_vec_size < 1:
        raise ArgumentError(
            f"get_fp4_shape: input_shape must have at least 1 dimension and sf_vec_size be at least 1, got "
            f"{tuple(input_shape)} and {sf_vec_size}"
        )
    *lead, cols = input_shape
    rows, per_row = math.prod(lead), cols // sf_vec_size
    if is_swizzled_layout:
        rows, per_row = compute_swizzled_sf_shape(rows, per_row)
    return [*lead, cols // 2], rows * per_row
