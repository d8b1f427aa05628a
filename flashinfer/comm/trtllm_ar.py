# SPDX-License-Identifier: Apache-2.0
"""Published module of the fused all-reduce: its constants, and the calls whose workspace is a tensor of addresses."""

from __future__ import annotations

from typing import Any

from .reduce.addresses import (
    check_trtllm_allreduce_fusion_workspace_metadata,
    trtllm_allreduce_fusion,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_destroy_ipc_workspace_for_all_reduce,
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
    trtllm_lamport_initialize,
    trtllm_lamport_initialize_all,
    trtllm_moe_allreduce_fusion,
    trtllm_moe_finalize_allreduce_fusion,
)
from .reduce.types import (
    AllReduceFusionOp,
    AllReduceFusionPattern,
    AllReduceStrategyConfig,
    AllReduceStrategyType,
    QuantizationSFLayout,
    compute_fp4_swizzled_layout_sf_size,
)
from .reduce.workspace import get_allreduce_module

__all__ = [
    "AllReduceFusionOp",
    "AllReduceFusionPattern",
    "AllReduceStrategyConfig",
    "AllReduceStrategyType",
    "QuantizationSFLayout",
    "check_trtllm_allreduce_fusion_workspace_metadata",
    "compute_fp4_swizzled_layout_sf_size",
    "get_trtllm_comm_module",
    "trtllm_allreduce_fusion",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_destroy_ipc_workspace_for_all_reduce",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "trtllm_lamport_initialize",
    "trtllm_lamport_initialize_all",
    "trtllm_moe_allreduce_fusion",
    "trtllm_moe_finalize_allreduce_fusion",
]


def get_trtllm_comm_module() -> Any:
    """Return the module of the all-reduce for CUDA."""
    return get_allreduce_module("cuda")
