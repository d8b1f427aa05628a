# SPDX-License-Identifier: Apache-2.0
"""Published path of attention over sequences that ranks share."""

from flashinfer.attention.parallel import (
    ParallelAttention,
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
