# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``cutlass_fused_moe`` with four-bit weights, one for each format.

Weights and their scales are those that the functions of flashinfer/fused_moe/mixed_weights.py have prepared.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..check import default_check
from ..template import Axis, Const, Tensor, TraceTemplate, Value, Var
from .fused_moe_arguments import AXES, INPUTS, OUTPUT, any_scale, optional_inputs, quant_scale
from .fused_moe_inputs import (
    cutlass_fused_moe_int4_fp8_init,
    cutlass_fused_moe_mxfp4_fp8_init,
    cutlass_fused_moe_mxfp4_init,
)
from .fused_moe_reference import fold_experts
from .fused_moe_w4_layout import int4_weights, mxfp4_weights, shifted_mxfp4_weights
from .shared import fp8_check, to_fp8

__all__ = ["INT4_FP8", "MXFP4", "MXFP4_FP8"]


def _cutlass_fused_moe_mxfp4_reference(
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
    out = fold_experts(
        input.float(),
        token_selected_experts,
        token_final_scales,
        mxfp4_weights(fc1_expert_weights, fc1_scale),
        mxfp4_weights(fc2_expert_weights, fc2_scale),
        round_hidden=lambda h, expert: h.to(input.dtype).float(),
        tp_rank=tp_rank,
        ep_rank=ep_rank,
        activation_type=activation_type,
        **others,
    )
    return out.to(output_dtype)


def _as_e4m3(x: torch.Tensor, factor: Optional[torch.Tensor]) -> torch.Tensor:
    """Values of rows after e4m3(x * factor of the column): bits of bfloat16 numbers in any 16-bit dtype, or none."""
    if factor is not None and factor.numel() > 0:
        x = x * factor.reshape(-1).view(torch.bfloat16).float()
    return to_fp8(x, torch.float8_e4m3fn).float()


def _int4_check(
    reference_outputs: Any,
    actual_outputs: Any,
    *,
    max_mismatch_pct: float = 5.0,
    min_cos_sim: Any = 0.999,
    **tolerances: Any,
) -> bool:
    # SM90 rounds products of codes and scales to bfloat16, so that 2 % of the hidden values fall to a neighbouring e4m3
    # code: 2.7 % of the results of a layer with 512 columns in fc2 are beyond a hundredth then, the furthest by 0.035.
    limits = {"max_mismatch_pct": max_mismatch_pct, "min_cos_sim": min_cos_sim, **tolerances}
    return default_check(reference_outputs, actual_outputs, **limits)


def _cutlass_fused_moe_int4_fp8_reference(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: Optional[torch.Tensor],
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    fc1_scale: torch.Tensor,
    fc2_scale: torch.Tensor,
    fc1_act: Optional[torch.Tensor],
    fc2_act: Optional[torch.Tensor],
    fc1_alpha: torch.Tensor,
    fc2_alpha: torch.Tensor,
    output_dtype: torch.dtype,
    tp_rank: int = 0,
    ep_rank: int = 0,
    activation_type: int = 3,
    **others: Any,
) -> torch.Tensor:
    out = fold_experts(
        _as_e4m3(input.float(), fc1_act),
        token_selected_experts,
        token_final_scales,
        int4_weights(fc1_expert_weights, fc1_scale) * fc1_alpha.view(-1, 1, 1),
        int4_weights(fc2_expert_weights, fc2_scale) * fc2_alpha.view(-1, 1, 1),
        round_hidden=lambda h, expert: _as_e4m3(h, fc2_act),
        tp_rank=tp_rank,
        ep_rank=ep_rank,
        activation_type=activation_type,
        **others,
    )
    return out.to(output_dtype)


def _rows_as_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Values of rows after e4m3(x * q) with q = 448 / amax of the row, or 1 where that is zero."""
    amax = x.abs().amax(dim=1, keepdim=True)
    # Both operands of the division are tensors: torch divides a number by multiplying with the reciprocal.
    q = torch.where(amax == 0, 1.0, torch.full_like(amax, 448.0) / amax)
    return to_fp8(x * q, torch.float8_e4m3fn).float() * q.reciprocal()


def _cutlass_fused_moe_mxfp4_fp8_reference(
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: Optional[torch.Tensor],
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    fc1_offset: torch.Tensor,
    fc1_factor: torch.Tensor,
    fc2_offset: torch.Tensor,
    fc2_factor: torch.Tensor,
    output_dtype: torch.dtype,
    tp_rank: int = 0,
    ep_rank: int = 0,
    activation_type: int = 3,
    **others: Any,
) -> torch.Tensor:
    out = fold_experts(
        _rows_as_e4m3(input.float()),
        token_selected_experts,
        token_final_scales,
        shifted_mxfp4_weights(fc1_expert_weights, fc1_offset) * fc1_factor.view(-1, 1, 1),
        shifted_mxfp4_weights(fc2_expert_weights, fc2_offset) * fc2_factor.view(-1, 1, 1),
        round_hidden=lambda h, expert: _rows_as_e4m3(h),
        tp_rank=tp_rank,
        ep_rank=ep_rank,
        activation_type=activation_type,
        **others,
    )
    return out.to(output_dtype)


_AXES: dict[str, Axis] = {
    **{name: axis for name, axis in AXES.items() if name != "intermediate_size"},
    "packed_hidden": Const("bytes of two codes in a row of fc1", abbrev=""),
    "packed_intermediate": Const("half the intermediate size: bytes of two codes in a row of fc2", abbrev="pi"),
    "fc1_row_blocks": Const("64 rows", abbrev=""),
    "hidden_blocks": Const("128 columns", abbrev=""),
    "fc2_row_blocks": Const("64 rows", abbrev=""),
    "intermediate_blocks": Const("128 columns", abbrev=""),
    "folded_rows": Const("rows of a block that lie one below another", abbrev=""),
    "folded_scales": Const("16 bytes: rows side by side, and the groups of each", abbrev=""),
}
_CONSTRAINTS = [
    "packed_hidden * 2 == hidden_size",
    "fc1_row_blocks * 64 == fc1_rows",
    "hidden_blocks * 128 == hidden_size",
    "fc2_row_blocks * 64 == hidden_size",
    "intermediate_blocks * 64 == packed_intermediate",
]
_ORDER = "as interleave_moe_weights_for_sm90_mixed_gemm returns them"
_INPUTS: dict[str, Value] = {
    **INPUTS,
    "fc1_expert_weights": Tensor(
        ("num_local_experts", "fc1_rows", "packed_hidden"), dtype="uint8", description=f"[up ; gate], {_ORDER}"
    ),
    "fc2_expert_weights": Tensor(
        ("num_local_experts", "hidden_size", "packed_intermediate"), dtype="uint8", description=_ORDER
    ),
}


def _folded(product: int, index: int, dtype: str, description: str) -> Tensor:
    """Return the scales of the weights of a product, an element of ``quant_scales``."""
    blocks = ("fc1_row_blocks", "hidden_blocks") if product == 1 else ("fc2_row_blocks", "intermediate_blocks")
    dims = ("num_local_experts", *blocks, "folded_rows", "folded_scales")
    text = f"{description}, as interleave_moe_scales_for_sm90_mixed_gemm returns them"
    return Tensor(dims, param="quant_scales", tuple_idx=index, dtype=dtype, description=text)


_EXPONENTS = "2^(byte - 127) for 32 columns"
_SHIFTS = "2^(byte - 6) for 32 columns, bytes 1 to 12"
_NUMBERS = "bits of bfloat16 numbers for 128 columns"
_ACT = "bits of bfloat16 factors of columns before their rounding; empty: 1"

MXFP4 = TraceTemplate(
    "moe",
    axes=_AXES,
    inputs={
        **_INPUTS,
        "fc1_scale": _folded(1, 0, "uint8", _EXPONENTS),
        "fc2_scale": _folded(2, 1, "uint8", _EXPONENTS),
        **optional_inputs("bfloat16"),
    },
    outputs=OUTPUT,
    constraints=_CONSTRAINTS,
    name_prefix="cutlass_fused_moe_mxfp4",
    reference=_cutlass_fused_moe_mxfp4_reference,
    init=cutlass_fused_moe_mxfp4_init,
    description="A layer of experts with MXFP4 weights and bfloat16 tokens.",
)
INT4_FP8 = TraceTemplate(
    "moe",
    axes={**_AXES, "intermediate_size": Var()},
    inputs={
        **_INPUTS,
        "fc1_scale": _folded(1, 0, "bfloat16", _NUMBERS),
        "fc2_scale": _folded(2, 1, "bfloat16", _NUMBERS),
        "fc1_act": any_scale(2, "hidden_size", description=_ACT),
        "fc2_act": any_scale(3, "intermediate_size", description=_ACT),
        "fc1_zeros": any_scale(4),
        "fc2_zeros": any_scale(5),
        "fc1_alpha": quant_scale(6, "num_local_experts"),
        "fc2_alpha": quant_scale(7, "num_local_experts"),
        **optional_inputs("bfloat16"),
    },
    outputs=OUTPUT,
    constraints=[*_CONSTRAINTS, "intermediate_size == packed_intermediate * 2"],
    name_prefix="cutlass_fused_moe_int4_fp8",
    reference=_cutlass_fused_moe_int4_fp8_reference,
    init=cutlass_fused_moe_int4_fp8_init,
    check=_int4_check,
    description="A layer of experts with int4 weights, whose operands are e4m3 with a factor for each column.",
)
MXFP4_FP8 = TraceTemplate(
    "moe",
    axes=_AXES,
    inputs={
        **_INPUTS,
        "fc1_offset": _folded(1, 0, "int32", _SHIFTS),
        "fc1_factor": quant_scale(1, "num_local_experts"),
        "fc2_act": any_scale(2),
        "fc2_offset": _folded(2, 3, "int32", _SHIFTS),
        "fc2_factor": quant_scale(4, "num_local_experts"),
        **optional_inputs("bfloat16"),
    },
    outputs=OUTPUT,
    constraints=_CONSTRAINTS,
    name_prefix="cutlass_fused_moe_mxfp4_fp8",
    reference=_cutlass_fused_moe_mxfp4_fp8_reference,
    init=cutlass_fused_moe_mxfp4_fp8_init,
    check=fp8_check,
    description="A layer of experts with rewritten MXFP4 weights, whose operands are e4m3 with a scale for each row.",
)
