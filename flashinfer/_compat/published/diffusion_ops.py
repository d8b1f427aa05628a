# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the diffusion ops of :mod:`flashinfer.norm`."""

from flashinfer.norm import (
    fused_dit_gate_residual_layernorm_gamma_beta as fused_dit_gate_residual_layernorm_gamma_beta,
)
from flashinfer.norm import (
    fused_dit_gate_residual_layernorm_scale_shift as fused_dit_gate_residual_layernorm_scale_shift,
)
from flashinfer.norm import fused_dit_residual_layernorm_scale_shift as fused_dit_residual_layernorm_scale_shift
from flashinfer.norm import fused_qk_rmsnorm_rope as fused_qk_rmsnorm_rope
