# SPDX-License-Identifier: Apache-2.0
"""Names of MoE kernels that engines import and that only Blackwell GPUs can serve: each raises when it is called."""

from __future__ import annotations

from .unsupported import needs

__all__ = [
    "cudnn_frost_grouped_gemm1_swiglu",
    "cudnn_frost_grouped_gemm1_swiglu_workspace_size",
    "setup_cubin_loader",
    "trtllm_bf16_moe",
    "trtllm_bf16_routed_moe",
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe",
    "trtllm_fp8_per_tensor_scale_moe",
    "trtllm_fp8_per_tensor_scale_routed_moe",
    "trtllm_gen_routing",
    "trtllm_mxint4_block_scale_moe",
    "trtllm_mxint4_block_scale_routed_moe",
]

_CALLBACK = "a module that loads pre-built kernels by a callback, which this package does not have"
_GPU = "a Blackwell GPU (SM100) and kernels for it, which this package does not have"

cudnn_frost_grouped_gemm1_swiglu = needs("cudnn_frost_grouped_gemm1_swiglu", _GPU)
cudnn_frost_grouped_gemm1_swiglu_workspace_size = needs("cudnn_frost_grouped_gemm1_swiglu_workspace_size", _GPU)
setup_cubin_loader = needs("setup_cubin_loader", _CALLBACK)
trtllm_bf16_moe = needs("trtllm_bf16_moe", _GPU)
trtllm_bf16_routed_moe = needs("trtllm_bf16_routed_moe", _GPU)
trtllm_fp4_block_scale_moe = needs("trtllm_fp4_block_scale_moe", _GPU)
trtllm_fp4_block_scale_routed_moe = needs("trtllm_fp4_block_scale_routed_moe", _GPU)
trtllm_fp8_block_scale_moe = needs("trtllm_fp8_block_scale_moe", _GPU)
trtllm_fp8_block_scale_routed_moe = needs("trtllm_fp8_block_scale_routed_moe", _GPU)
trtllm_fp8_per_tensor_scale_moe = needs("trtllm_fp8_per_tensor_scale_moe", _GPU)
trtllm_fp8_per_tensor_scale_routed_moe = needs("trtllm_fp8_per_tensor_scale_routed_moe", _GPU)
trtllm_gen_routing = needs("trtllm_gen_routing", _GPU)
trtllm_mxint4_block_scale_moe = needs("trtllm_mxint4_block_scale_moe", _GPU)
trtllm_mxint4_block_scale_routed_moe = needs("trtllm_mxint4_block_scale_routed_moe", _GPU)
