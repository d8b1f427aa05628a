# SPDX-License-Identifier: Apache-2.0
"""Buckets of token counts for tuning, and random routings."""

from __future__ import annotations

import functools
from typing import Callable

import torch

from .._runtime.errors import ArgumentError
from .._runtime.integer_math import next_positive_power_of_2, round_up

__all__ = [
    "get_hybrid_num_tokens_buckets",
    "make_hybrid_bucket_mapper",
    "make_random_topk_ids",
    "map_to_hybrid_bucket",
    "map_to_hybrid_bucket_uncapped",
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


def make_random_topk_ids(num_experts: int, num_tokens: int, top_k: int, device: torch.device) -> torch.Tensor:
    """Choose ``top_k`` different experts for each token: ``(num_tokens, top_k)`` int32."""
    return torch.rand(num_tokens, num_experts, device=device).topk(top_k, dim=1).indices.to(torch.int32)
