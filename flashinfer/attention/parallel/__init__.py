# SPDX-License-Identifier: Apache-2.0
"""Attention over sequences that ranks share: Ulysses swaps heads for tokens, a ring passes keys on."""

from .attention import ParallelAttention
from .config import (
    UnevenCPConfig,
    VarlenCPConfig,
    get_parallel_groups,
    ring_varlen_config,
    split_varlen_input,
    ulysses_varlen_config,
    uneven_cp_config,
)

__all__ = [
    "ParallelAttention",
    "UnevenCPConfig",
    "VarlenCPConfig",
    "get_parallel_groups",
    "ring_varlen_config",
    "split_varlen_input",
    "ulysses_varlen_config",
    "uneven_cp_config",
]
