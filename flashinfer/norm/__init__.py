# SPDX-License-Identifier: Apache-2.0
"""Normalisation: RMSNorm, LayerNorm, and their forms fused with what stands next to them in a model."""

from ..jit.norm import gen_norm_module as gen_norm_module
from .block_quant import fused_add_rmsnorm_fp8_block_quant
from .cute_names import qk_rmsnorm_cute as qk_rmsnorm_cute
from .dit_layernorm import (
    fused_dit_gate_residual_layernorm_gamma_beta,
    fused_dit_gate_residual_layernorm_scale_shift,
    fused_dit_residual_layernorm_scale_shift,
)
from .gated import (
    gated_residual_next_rmsnorm,
    gated_residual_rmsnorm,
    rmsnorm_sigmoid_gate,
)
from .gated import supports_gated_residual_next_rmsnorm as supports_gated_residual_next_rmsnorm
from .gated import supports_gated_residual_rmsnorm as supports_gated_residual_rmsnorm
from .gated import supports_rmsnorm_sigmoid_gate as supports_rmsnorm_sigmoid_gate
from .layernorm import layernorm, layernorm_quant
from .modules import get_norm_module as get_norm_module
from .qk_rmsnorm_rope import fused_qk_rmsnorm_rope
from .rmsnorm import (
    fused_add_rmsnorm,
    fused_add_rmsnorm_quant,
    fused_rmsnorm_silu,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    rmsnorm,
    rmsnorm_quant,
)

_USE_CUDA_NORM = True  # engines ask which kernels the norms have: here always CUDA

__all__ = [
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_fp8_block_quant",
    "fused_add_rmsnorm_quant",
    "fused_dit_gate_residual_layernorm_gamma_beta",
    "fused_dit_gate_residual_layernorm_scale_shift",
    "fused_dit_residual_layernorm_scale_shift",
    "fused_qk_rmsnorm_rope",
    "fused_rmsnorm_silu",
    "gated_residual_next_rmsnorm",
    "gated_residual_rmsnorm",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "layernorm",
    "layernorm_quant",
    "rmsnorm",
    "rmsnorm_quant",
    "rmsnorm_sigmoid_gate",
]
