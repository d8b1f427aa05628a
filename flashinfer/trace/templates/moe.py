# SPDX-License-Identifier: Apache-2.0
"""The published templates of mixture-of-experts layers under one name; each is defined with its family."""

from __future__ import annotations

from .fused_moe import cutlass_fused_moe_trace
from .moe_blackwell import (
    b12x_fused_moe_trace,
    trtllm_bf16_moe_trace,
    trtllm_bf16_routed_moe_trace,
    trtllm_fp4_block_scale_moe_ds_routing_trace,
    trtllm_fp4_block_scale_moe_trace_dispatch,
    trtllm_fp8_block_scale_moe_default_routing_trace,
    trtllm_fp8_block_scale_moe_ds_routing_trace,
    trtllm_fp8_block_scale_moe_trace_dispatch,
    trtllm_fp8_block_scale_routed_moe_trace,
)

__all__ = [
    "b12x_fused_moe_trace",
    "cutlass_fused_moe_trace",
    "trtllm_bf16_moe_trace",
    "trtllm_bf16_routed_moe_trace",
    "trtllm_fp4_block_scale_moe_ds_routing_trace",
    "trtllm_fp4_block_scale_moe_trace_dispatch",
    "trtllm_fp8_block_scale_moe_default_routing_trace",
    "trtllm_fp8_block_scale_moe_ds_routing_trace",
    "trtllm_fp8_block_scale_moe_trace_dispatch",
    "trtllm_fp8_block_scale_routed_moe_trace",
]
