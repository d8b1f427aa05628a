# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic of tile counts and paddings."""

from __future__ import annotations

__all__ = [
    "calculate_tile_tokens_dim",
    "ceil_div",
    "get_trtllm_gen_multi_ctas_kv_counter_bytes",
    "last_positive_power_of_2",
    "next_positive_power_of_2",
    "round_up",
]


def ceil_div(x: int, y: int) -> int:
    """Divide ``x`` by ``y`` and round towards plus infinity."""
    return -(-x // y)


def round_up(x: int, y: int) -> int:
    """Return the smallest multiple of ``y`` that is not below ``x``."""
    return ceil_div(x, y) * y


def get_trtllm_gen_multi_ctas_kv_counter_bytes(batch_size: int, num_qo_heads: int, sm_count: int) -> int:
    """Return the bytes of ``multi_ctas_kv_counter_buffer``: 4-byte counters, rounded up to 8 counters.

    There is one counter for each head of each request, or for each SM if there are more SMs."""
    return 4 * round_up(max(batch_size * num_qo_heads, sm_count), 8)


def next_positive_power_of_2(x: int) -> int:
    """Return the smallest power of two that is not below ``x``; 1 for ``x < 1``."""
    return 1 << max(x - 1, 0).bit_length()


def last_positive_power_of_2(x: int) -> int:
    """Return the largest power of two that is not above ``x``; 1 for ``x < 1``."""
    return 1 << max(x.bit_length() - 1, 0) if x > 0 else 1


def calculate_tile_tokens_dim(num_tokens: int, num_experts: int, top_k: int, max_tile_tokens_dim: int = 128) -> int:
    """Return the tokens per tile of a mixture of experts: tokens per expert if equal, as a power of two from 8."""
    per_expert = num_tokens * top_k // num_experts
    return min(max(next_positive_power_of_2(per_expert), 8), max_tile_tokens_dim)
