# SPDX-License-Identifier: Apache-2.0
"""Buckets: representative sizes, each of which stands for the sizes around it."""

from __future__ import annotations

import bisect
import functools
from typing import Callable, Sequence

from .._runtime.errors import ArgumentError
from .._runtime.integer_math import next_positive_power_of_2

__all__ = ["checked_buckets", "make_bucket_mapper", "make_generated_bucket_mapper", "round_to_nearest_bucket"]


def checked_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    """Return the buckets sorted, without duplicates."""
    if not buckets:
        raise ArgumentError("autotune: tuning_buckets must have at least one size, got none")
    if not all(isinstance(size, int) for size in buckets):
        raise ArgumentError(f"autotune: tuning_buckets must be whole numbers, got {buckets!r}")
    if min(buckets) < 0:
        raise ArgumentError(f"autotune: tuning_buckets must be sizes of 0 or more, got {min(buckets)}")
    return tuple(sorted(set(buckets)))


def round_to_nearest_bucket(x: int, buckets: Sequence[int], round_map: bool = False) -> int:
    """Return the largest of ascending ``buckets`` up to ``x``, or with ``round_map`` the smallest from ``x`` on.

    If there is no such bucket, return the nearest one.

    Examples
    --------
    >>> from flashinfer.autotuner import round_to_nearest_bucket
    >>> round_to_nearest_bucket(100, (16, 64, 256)), round_to_nearest_bucket(100, (16, 64, 256), round_map=True)
    (64, 256)
    """
    at = bisect.bisect_left(buckets, x) if round_map else bisect.bisect_right(buckets, x) - 1
    return buckets[min(max(at, 0), len(buckets) - 1)]


@functools.cache
def make_bucket_mapper(buckets: tuple[int, ...], round_map: bool = False) -> Callable[[int], int]:
    """Return :func:`round_to_nearest_bucket` for these buckets; equal buckets give the same function object."""
    rising = checked_buckets(buckets)
    return lambda x: round_to_nearest_bucket(x, rising, round_map)


@functools.lru_cache(maxsize=1024)
def make_generated_bucket_mapper(generate: Callable[[int], Sequence[int]]) -> Callable[[int], int]:
    """Return a mapper for the buckets ``generate(x)``: rounds up to a power of two, at most the largest bucket."""
    return lambda x: min(next_positive_power_of_2(x), max(generate(x)))
