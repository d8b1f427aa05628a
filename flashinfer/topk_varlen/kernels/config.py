# SPDX-License-Identifier: Apache-2.0
"""The configuration that callers of the Blackwell kernel "gvr" build; it is checked here and used by no kernel."""

from __future__ import annotations

from dataclasses import dataclass

from ..._runtime.errors import ArgumentError

__all__ = ["GvrTopKLBConfig"]


def _is_power_of_two(x: int, low: int, high: int) -> bool:
    return low <= x <= high and x & (x - 1) == 0


@dataclass(frozen=True)
class GvrTopKLBConfig:
    """Distribution of rows over clusters."""

    max_batch_size: int = 1024
    long_threshold: int = 65536
    cluster_size: int = 4
    num_threads: int = 512

    def __post_init__(self) -> None:
        if not _is_power_of_two(self.max_batch_size, 64, 1024):
            raise ArgumentError(
                f"GvrTopKLBConfig: max_batch_size must be a power of 2 in [64, 1024], got {self.max_batch_size}"
            )
        if not _is_power_of_two(self.cluster_size, 1, 16):
            raise ArgumentError(
                f"GvrTopKLBConfig: cluster_size must be one of 1, 2, 4, 8 and 16, got {self.cluster_size}"
            )
        if self.num_threads not in (512, 1024):
            raise ArgumentError(f"GvrTopKLBConfig: num_threads must be 512 or 1024, got {self.num_threads}")
