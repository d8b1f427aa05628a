# SPDX-License-Identifier: Apache-2.0
"""Templates and references of the gated norms of ``flashinfer.norm``."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceTemplate, Value, Var
from .shared import normalize

__all__ = ["gated_residual_next_rmsnorm_trace", "gated_residual_rmsnorm_trace", "rmsnorm_sigmoid_gate_trace"]


def _gated_residual_rmsnorm_reference(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional[torch.Tensor],
    alpha: Union[torch.Tensor, float],
    beta: torch.Tensor,
    eps: float = 1e-6,
    gain_center: float = 0.0,
    **_: Any,
) -> torch.Tensor:
    x = branch.double()
    if weight is not None:
        x = x * (weight.double() + gain_center)
    return (alpha * residual.double() + beta.double() * normalize(x, eps)).float()


def _gated_residual_next_rmsnorm_reference(
    branch: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    alpha: Union[torch.Tensor, float],
    beta: torch.Tensor,
    post_eps: float = 1e-6,
    next_eps: float = 1e-6,
    next_gain_center: float = 0.0,
    post_weight: Optional[torch.Tensor] = None,
    post_gain_center: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    stream = _gated_residual_rmsnorm_reference(branch, residual, post_weight, alpha, beta, post_eps, post_gain_center)
    y = normalize(stream.double(), next_eps) * (next_weight.double() + next_gain_center)
    return stream, y.to(branch.dtype)


def _rmsnorm_sigmoid_gate_reference(
    input: torch.Tensor, gate: torch.Tensor, eps: float = 1e-5, **_: Any
) -> torch.Tensor:
    return (normalize(input.double(), eps) * torch.sigmoid(gate.double())).to(input.dtype)


_ROWS: dict[str, Axis] = {"batch_size": Var("rows"), "hidden_size": Const(abbrev="h")}
_MATRIX, _VECTOR = ("batch_size", "hidden_size"), ("hidden_size",)
_BRANCH: dict[str, Value] = {
    "branch": Tensor(_MATRIX, dtype="bfloat16"),
    "residual": Tensor(_MATRIX, dtype="float32"),
}
_FACTORS: dict[str, Value] = {
    "alpha": Tensor(_VECTOR, dtype="float32", description="factor of the residual"),
    "beta": Tensor(_VECTOR, dtype="float32", description="factor of the branch"),
}

gated_residual_rmsnorm_trace = TraceTemplate(
    "rmsnorm",
    axes=_ROWS,
    inputs={
        **_BRANCH,
        "weight": Tensor(_VECTOR, dtype="bfloat16", optional=True),
        **_FACTORS,
        "eps": Scalar(optional=True),
        "gain_center": Scalar(optional=True),
    },
    outputs={"output": Tensor(_MATRIX, param="out", dtype="float32")},
    name_prefix="gated_residual_rmsnorm",
    reference=_gated_residual_rmsnorm_reference,
    description="alpha * residual + beta * rms(branch * gain), in float32.",
)
gated_residual_next_rmsnorm_trace = TraceTemplate(
    "rmsnorm",
    axes=_ROWS,
    inputs={
        **_BRANCH,
        "next_weight": Tensor(_VECTOR, dtype="bfloat16"),
        **_FACTORS,
        "post_eps": Scalar(optional=True),
        "next_eps": Scalar(optional=True),
        "next_gain_center": Scalar(optional=True),
        "post_weight": Tensor(_VECTOR, dtype="bfloat16", optional=True),
        "post_gain_center": Scalar(optional=True),
    },
    outputs={
        "stream": Tensor(_MATRIX, param="residual_out", dtype="float32"),
        "output": Tensor(_MATRIX, param="ffn_input", dtype_from="branch"),
    },
    name_prefix="gated_residual_next_rmsnorm",
    reference=_gated_residual_next_rmsnorm_reference,
    description="The gated residual sum in float32, and its norm in bfloat16.",
)
rmsnorm_sigmoid_gate_trace = TraceTemplate(
    "rmsnorm",
    axes={"batch_size": Var(), "num_heads": Var(), "head_dim": Const("normalised dimension", abbrev="d")},
    inputs={
        "input": Tensor(("batch_size", "num_heads", "head_dim"), dtype="bfloat16", description="in place"),
        "gate": Tensor(("batch_size", "num_heads", "head_dim"), dtype="bfloat16"),
        "eps": Scalar(optional=True),
    },
    outputs={"output": Tensor(("batch_size", "num_heads", "head_dim"), param="input", dtype_from="input")},
    name_prefix="rmsnorm_sigmoid_gate",
    reference=_rmsnorm_sigmoid_gate_reference,
    description="rms(input) * sigmoid(gate) of each head, in place.",
)
