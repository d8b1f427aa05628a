# SPDX-License-Identifier: Apache-2.0
"""Ordinary calls of ``cutlass_fused_moe`` on SM90, straight to native code (:mod:`flashinfer._runtime.shortcut`).

Ordinary are 16-bit and 8-bit weights in any of their layers, and MXFP4 with bfloat16 tokens; csrc/fused_moe.cu compares
shapes, dtypes and devices. In a process that has used the autotuner, layers whose tiles may have been measured are
ordinary once the checked way has asked for them.
"""

from __future__ import annotations

from typing import Optional, Sequence, Union

import torch

from ..._runtime.allocation import allocate
from ..._runtime.arch import capability_of
from ...autotuner import AutoTuner
from ...tllm_enums import ActivationType
from .call import native_fused_moe, sm90_product, w4_product
from .formats import Format, sharing_ranks
from .results import kept, unspecified
from .tuning import FEWEST_TOKENS, Product, product_tuned_before

__all__ = ["ordinary_fused_moe"]

_BF16, _F16, _E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
_NUMBERS = {x: int(x) for x in ActivationType if x is not ActivationType.InvalidType}
_SWIGLU, _SWIGLU_BIAS = int(ActivationType.Swiglu), int(ActivationType.SwigluBias)
_PLAIN_KINDS = {_BF16: "bf16", _F16: "fp16"}
_PLAIN, _FP8_TENSOR, _FP8_BLOCK, _MXFP4 = Format.PLAIN, Format.FP8_TENSOR, Format.FP8_BLOCK, Format.MXFP4

OptionalTensor = Optional[torch.Tensor]


def ordinary_fused_moe(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: OptionalTensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: Optional[Sequence[torch.Tensor]],
    fc1_expert_biases: OptionalTensor,
    fc2_expert_biases: OptionalTensor,
    input_sf: OptionalTensor,
    swiglu_alpha: OptionalTensor,
    swiglu_beta: OptionalTensor,
    swiglu_limit: OptionalTensor,
    tp_size: int,
    tp_rank: int,
    ep_size: int,
    ep_rank: int,
    cluster_size: int,
    cluster_rank: int,
    output: OptionalTensor,
    enable_alltoall: bool,
    use_deepseek_fp8_block_scale: bool,
    use_w4_group_scaling: bool,
    use_mxfp8_act_scaling: bool,
    min_latency_mode: bool,
    use_packed_weights: bool,
    use_wfp4afp8_humming: bool,
    tune_max_num_tokens: int,
    enable_pdl: Optional[bool],
    activation_type: Union[int, ActivationType],
    profile_ids: Optional[Sequence[int]],
    workspace_buffer: OptionalTensor,
    situ_beta: OptionalTensor,
    situ_linear_beta: OptionalTensor,
) -> Optional[list[torch.Tensor]]:
    index = input.get_device()
    if (
        capability_of[index] != 90
        or min_latency_mode
        or use_mxfp8_act_scaling
        or input_sf is not None
        or profile_ids is not None
        or cluster_size != 1
        or cluster_rank
        or not 0 <= tp_rank < tp_size
        or not 0 <= ep_rank < ep_size
        or type(activation_type) is not ActivationType
        or not input.is_contiguous()
    ):
        return None
    activation = _NUMBERS[activation_type]
    if activation == _SWIGLU and not (swiglu_alpha is swiglu_beta is swiglu_limit is None):
        activation = _SWIGLU_BIAS
    scale1 = scale2 = factor1 = factor2 = quant2 = None
    if use_deepseek_fp8_block_scale:
        scale1, scale2 = quant_scales  # type: ignore[misc]
        format, kind = _FP8_BLOCK, "fp8_block"
    elif use_w4_group_scaling:
        if use_packed_weights or use_wfp4afp8_humming:
            return None
        scale1, scale2 = quant_scales  # type: ignore[misc]
        format, kind = _MXFP4, "mxfp4"
    elif fc1_expert_weights.dtype is _E4M3:
        factor1, quant2, factor2, _ = quant_scales  # type: ignore[misc]
        format, kind = _FP8_TENSOR, "fp8"
    elif quant_scales or input.dtype not in _PLAIN_KINDS:
        return None
    else:
        format, kind = _PLAIN, _PLAIN_KINDS[input.dtype]
    (tokens, hidden), experts = input.shape, fc1_expert_weights.shape[0]
    if output is None:
        if output_dtype is not _BF16 and output_dtype is not _F16:
            return None
        output = allocate((tokens, hidden), (hidden or 1, 1), output_dtype, index)
    elif output.dtype is not output_dtype:
        return None
    first_expert, ranks = ep_rank * experts, ep_size
    if enable_alltoall:
        ranks = sharing_ranks(ep_size, True, token_selected_experts)
    product: Product = w4_product[kind] if format == _MXFP4 else sm90_product[kind]
    # fmt: off
    if AutoTuner.was_used and tokens >= FEWEST_TOKENS:
        inputs = (output, input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights,
                  fc1_expert_biases)
        product = product_tuned_before(kind, format, activation, ranks, inputs, tune_max_num_tokens)
        if product is None:
            return None
    native_fused_moe[True](
        output, input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights,
        fc1_expert_biases, fc2_expert_biases, scale1, scale2, factor1, factor2, None, quant2, swiglu_alpha,
        swiglu_beta, swiglu_limit, situ_beta, situ_linear_beta, workspace_buffer, product, format, activation,
        first_expert, tp_rank == 0, True, enable_pdl is not False, ranks,
    )
    # fmt: on
    return [output, *(kept.get((index, experts, tokens)) or unspecified(input, experts, tokens))]
