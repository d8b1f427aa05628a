# SPDX-License-Identifier: Apache-2.0
"""Axes, inputs and outputs that the templates of ``cutlass_fused_moe`` share."""

from __future__ import annotations

from dataclasses import replace
from typing import Optional

from ..template import Axis, Const, Scalar, Tensor, Value, Var

__all__ = ["AXES", "EXPERT", "INPUTS", "OUTPUT", "any_scale", "optional_inputs", "quant_scale"]

AXES: dict[str, Axis] = {
    "seq_len": Var(),
    "top_k": Const(abbrev="topk"),
    "num_local_experts": Const("experts of this rank", abbrev="e"),
    "hidden_size": Const(abbrev="h"),
    "fc1_rows": Const("twice the intermediate size where the activation is gated", abbrev=""),
    "intermediate_size": Const(abbrev="i"),
}
EXPERT = ("num_local_experts",)
INPUTS: dict[str, Value] = {
    "input": Tensor(("seq_len", "hidden_size")),
    "token_selected_experts": Tensor(("seq_len", "top_k"), dtype="int32"),
    "token_final_scales": Tensor(("seq_len", "top_k"), dtype="float32", optional=True),
    "fc1_expert_weights": Tensor(("num_local_experts", "fc1_rows", "hidden_size"), description="[up ; gate]"),
    "fc2_expert_weights": Tensor(("num_local_experts", "hidden_size", "intermediate_size")),
}
OUTPUT: dict[str, Value] = {"output": Tensor(("seq_len", "hidden_size"), param="output", dtype_from="output_dtype")}


def optional_inputs(bias_dtype: Optional[str] = None) -> dict[str, Value]:
    """Return what comes after the scales. ``bias_dtype`` is that of biases that a call lacks; None: of the weights."""
    return {
        "fc1_expert_biases": Tensor(("num_local_experts", "fc1_rows"), dtype=bias_dtype, optional=True),
        "fc2_expert_biases": Tensor(("num_local_experts", "hidden_size"), dtype=bias_dtype, optional=True),
        "swiglu_alpha": Tensor(EXPERT, dtype="float32", optional=True),
        "swiglu_beta": Tensor(EXPERT, dtype="float32", optional=True),
        "swiglu_limit": Tensor(EXPERT, dtype="float32", optional=True),
        "tp_rank": Scalar("int32", optional=True),
        "ep_rank": Scalar("int32", optional=True),
        "activation_type": Scalar("int32", optional=True),
        "situ_beta": Tensor(EXPERT, dtype="float32", optional=True),
        "situ_linear_beta": Tensor(EXPERT, dtype="float32", optional=True),
    }


def quant_scale(index: int, *dims: str) -> Tensor:
    """Return an element of ``quant_scales`` with fp32 numbers."""
    return Tensor(dims, param="quant_scales", tuple_idx=index, dtype="float32")


def any_scale(index: int, *dims: str, description: str = "not read") -> Tensor:
    """Return an element of ``quant_scales`` that may have any shape, or be None: axes are not read from it."""
    return replace(quant_scale(index, *dims), dtype="bfloat16", unread=True, optional=True, description=description)
