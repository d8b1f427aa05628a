# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``cutlass_fused_moe``, one for each format of weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Optional, Sequence

import torch

from ..template import Const, Tensor, TraceDispatch, TraceTemplate
from .fused_moe_arguments import AXES, INPUTS, OUTPUT, optional_inputs, quant_scale
from .fused_moe_inputs import (
    cutlass_fused_moe_fp8_block_init,
    cutlass_fused_moe_fp8_init,
    cutlass_fused_moe_fp8_per_expert_init,
    cutlass_fused_moe_init,
)
from .fused_moe_reference import fold_experts
from .fused_moe_w4 import INT4_FP8, MXFP4, MXFP4_FP8
from .gemm_blocks import spread_scales, to_e4m3_blocks
from .shared import fp8_check, to_fp8

__all__ = ["cutlass_fused_moe_trace"]


def _cutlass_fused_moe_reference(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: Optional[torch.Tensor],
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    tp_rank: int = 0,
    ep_rank: int = 0,
    activation_type: int = 3,
    **others: Any,
) -> torch.Tensor:
    out = fold_experts(
        input.float(),
        token_selected_experts,
        token_final_scales,
        fc1_expert_weights.float(),
        fc2_expert_weights.float(),
        round_hidden=lambda h, expert: h.to(input.dtype).float(),
        tp_rank=tp_rank,
        ep_rank=ep_rank,
        activation_type=activation_type,
        **others,
    )
    return out.to(input.dtype)


def _cutlass_fused_moe_fp8_reference(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: Optional[torch.Tensor],
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    fc1_dequant: torch.Tensor,
    fc2_quant: torch.Tensor,
    fc2_dequant: torch.Tensor,
    output_dtype: torch.dtype,
    tp_rank: int = 0,
    ep_rank: int = 0,
    activation_type: int = 3,
    **others: Any,
) -> torch.Tensor:
    quant = fc2_quant.expand(fc1_expert_weights.shape[0])
    out = fold_experts(
        input.float(),
        token_selected_experts,
        token_final_scales,
        fc1_expert_weights.float() * fc1_dequant.view(-1, 1, 1),
        fc2_expert_weights.float() * fc2_dequant.view(-1, 1, 1),
        round_hidden=lambda h, expert: to_fp8(h * quant[expert], torch.float8_e4m3fn).float(),
        tp_rank=tp_rank,
        ep_rank=ep_rank,
        activation_type=activation_type,
        **others,
    )
    return out.to(output_dtype)


def _quantized_rows(x: torch.Tensor) -> torch.Tensor:
    """Values of (n, k) after rounding to bf16 and quantisation to e4m3 by row and 128 columns."""
    n, k = x.shape
    padded = torch.zeros(n, (k + 127) // 128 * 128, device=x.device)
    padded[:, :k] = x.to(torch.bfloat16)
    codes, scales = to_e4m3_blocks(padded, 1)
    return (codes.float() * scales.repeat_interleave(128, dim=1))[:, :k]


def _cutlass_fused_moe_fp8_block_reference(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: Optional[torch.Tensor],
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    fc1_scale: torch.Tensor,
    fc2_scale: torch.Tensor,
    output_dtype: torch.dtype,
    tp_rank: int = 0,
    ep_rank: int = 0,
    activation_type: int = 3,
    **others: Any,
) -> torch.Tensor:
    def weights(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        spread = [spread_scales(scale, *codes.shape[1:]) for scale in scales]
        return codes.float() * torch.stack(spread)

    out = fold_experts(
        _quantized_rows(input),
        token_selected_experts,
        token_final_scales,
        weights(fc1_expert_weights, fc1_scale),
        weights(fc2_expert_weights, fc2_scale),
        round_sums=lambda z: z.to(torch.bfloat16).float(),
        round_hidden=lambda h, expert: _quantized_rows(h),
        tp_rank=tp_rank,
        ep_rank=ep_rank,
        activation_type=activation_type,
        **others,
    )
    return out.to(output_dtype)


_dense = TraceTemplate(
    "moe",
    axes=AXES,
    inputs={**INPUTS, "quant_scales": Tensor((), optional=True, description="none"), **optional_inputs()},
    outputs=OUTPUT,
    name_prefix="cutlass_fused_moe",
    reference=_cutlass_fused_moe_reference,
    init=cutlass_fused_moe_init,
    description="A layer of experts from routed ids to the weighted sum, in fp16 or bf16.",
)


def _fp8_template(
    suffix: str, fc2_quant: Tensor, init: Callable[..., dict[str, Any]], description: str
) -> TraceTemplate:
    return TraceTemplate(
        "moe",
        axes=AXES,
        inputs={
            **INPUTS,
            "fc1_dequant": quant_scale(0, "num_local_experts"),
            "fc2_quant": fc2_quant,
            "fc2_dequant": quant_scale(2, "num_local_experts"),
            "fc1_input_dequant": replace(quant_scale(3), unread=True, description="not read: part of fc1_dequant"),
            **optional_inputs("bfloat16"),
        },
        outputs=OUTPUT,
        name_prefix=f"cutlass_fused_moe_fp8{suffix}",
        reference=_cutlass_fused_moe_fp8_reference,
        init=init,
        check=fp8_check,
        description=f"A layer of experts with e4m3 tokens and weights, one factor per expert{description}.",
    )


_fp8 = _fp8_template("", quant_scale(1), cutlass_fused_moe_fp8_init, "")
_fp8_per_expert = _fp8_template(
    "_per_expert",
    quant_scale(1, "num_local_experts"),
    cutlass_fused_moe_fp8_per_expert_init,
    ", and one of its hidden values before their rounding",
)
_fp8_block = TraceTemplate(
    "moe",
    axes={
        **AXES,
        "fc1_row_blocks": Const(abbrev=""),
        "hidden_blocks": Const(abbrev=""),
        "intermediate_blocks": Const(abbrev=""),
    },
    inputs={
        **INPUTS,
        "fc1_scale": quant_scale(0, "num_local_experts", "fc1_row_blocks", "hidden_blocks"),
        "fc2_scale": quant_scale(1, "num_local_experts", "hidden_blocks", "intermediate_blocks"),
        **optional_inputs("bfloat16"),
    },
    outputs=OUTPUT,
    name_prefix="cutlass_fused_moe_fp8_block",
    reference=_cutlass_fused_moe_fp8_block_reference,
    init=cutlass_fused_moe_fp8_block_init,
    check=fp8_check,
    description="A layer of experts with e4m3 weights and scales of 128 x 128 blocks; tokens are quantised by 1 x 128.",
)


def _choose(
    fc1_expert_weights: Any = None,
    quant_scales: Optional[Sequence[torch.Tensor]] = None,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    **_: Any,
) -> TraceTemplate:
    """Return the template of a call, by the rule of ``format_of`` in flashinfer/fused_moe/cutlass/formats.py."""
    if use_deepseek_fp8_block_scale:
        return _fp8_block
    if use_w4_group_scaling:
        if use_wfp4afp8_humming:
            return MXFP4_FP8
        return INT4_FP8 if use_packed_weights else MXFP4
    if getattr(fc1_expert_weights, "dtype", None) is not torch.float8_e4m3fn:
        return _dense
    fc2_quant = quant_scales[1] if quant_scales and len(quant_scales) > 1 else None
    return _fp8_per_expert if isinstance(fc2_quant, torch.Tensor) and fc2_quant.numel() != 1 else _fp8


cutlass_fused_moe_trace = TraceDispatch(
    _choose, (_dense, _fp8, _fp8_per_expert, _fp8_block, MXFP4, INT4_FP8, MXFP4_FP8)
)
