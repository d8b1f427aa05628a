# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic of tile counts and paddings."""

from __future__ import annotations

__all__ = ["calculate_tile_tokens_dim", "ceil_div", "last_positive_power_of_2", "next_positive_power_of_2", "round_up"]


def ceil_div(x: int, y: int) -> int:
    """``x / y`` rounded towards plus infinity."""
    return -(-x // y)


def round_up(x: int, y: int) -> int:
    """Smallest multiple of ``y`` that is not below ``x``."""
    return ceil_div(x, y) * y


def next_positive_power_of_2(x: int) -> int:
    """Smallest power of two that is not below ``x``; 1 for ``x < 1``."""
    return 1 << max(x - 1, 0).bit_length()


def last_positive_power_of_2(x: int) -> int:
    """Largest power of two that is not above ``x``; 1 for ``x < 1``."""
    return 1 << max(x.bit_length() - 1, 0) if x > 0 else 1


def calculate_tile_tokens_dim(num_tokens: int, num_experts: int, top_k: int, max_tile_tokens_dim: int = 128) -> int:
    """Tokens per tile of a mixture of experts: what one expert gets when all get the same, as a power of two from 8."""
    per_expert = num_tokens * top_k // num_experts
    return min(max(next_positive_power_of_2(per_expert), 8), max_tile_tokens_dim)
