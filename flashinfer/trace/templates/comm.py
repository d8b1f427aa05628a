# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``flashinfer.comm.allreduce_fusion``.

The definition of one rank's call cannot hold the inputs of its peers: it describes the group of one rank. The reference
takes the inputs of several ranks, stacked in rank order, as well.
"""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from ..template import Const, Scalar, Tensor, TraceTemplate, Var
from .shared import normal, seeded

__all__ = ["allreduce_fusion_trace"]


def _allreduce_fusion_reference(
    input: torch.Tensor,
    pattern: int,
    residual_in: Optional[torch.Tensor] = None,
    rms_gamma: Optional[torch.Tensor] = None,
    rms_eps: float = 1e-6,
    scale_factor: Union[torch.Tensor, float, None] = None,
    weight_bias: float = 0.0,
    **_: Any,
) -> tuple[Optional[torch.Tensor], ...]:
    dtype = input.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    parts = input if input.ndim == 3 else input.unsqueeze(0)
    total = torch.zeros(parts.shape[1:], dtype=wide, device=input.device)
    for part in parts:  # in rank order
        total = total + part.to(wide)
    output = total.to(dtype)
    if pattern == 0 or residual_in is None or rms_gamma is None:
        return output, None, None, None, None
    residual_out = (output.to(wide) + residual_in.to(wide)).to(dtype)
    x = residual_out.to(wide)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + rms_eps)
    norm_out = (x * rstd * (weight_bias + rms_gamma.to(wide))).to(dtype)
    if pattern == 1:
        return output, residual_out, norm_out, None, None
    scale_out = None
    if pattern in (10, 11):
        scale_out = norm_out.to(wide).abs().amax(-1, keepdim=True).clamp(min=1 / 512) / 448
        scaled = norm_out.to(wide) / scale_out
    else:
        scaled = norm_out.to(wide) * (1 / (1.0 if scale_factor is None else scale_factor))
    quant_out = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    return output, residual_out, norm_out, quant_out, scale_out


def _allreduce_fusion_init(
    *, num_tokens: int, hidden_size: int = 4096, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "input": normal(g, num_tokens, hidden_size),
        "pattern": 1,
        "residual_in": normal(g, num_tokens, hidden_size),
        "rms_gamma": normal(g, hidden_size),
    }


_ROWS = ("num_tokens", "hidden_size")

allreduce_fusion_trace = TraceTemplate(
    "comm",
    axes={"num_tokens": Var(), "hidden_size": Const(abbrev="h"), "one": Const(abbrev="", value=1)},
    inputs={
        "input": Tensor(_ROWS, description="what this rank adds to the sum"),
        "pattern": Scalar("int32"),
        "residual_in": Tensor(_ROWS, optional=True),
        "rms_gamma": Tensor(("hidden_size",), optional=True),
        "rms_eps": Scalar(optional=True),
        "weight_bias": Scalar(optional=True),
    },
    outputs={
        "output": Tensor(_ROWS, dtype_from="input", optional=True),
        "residual_out": Tensor(_ROWS, dtype_from="input", optional=True),
        "norm_out": Tensor(_ROWS, dtype_from="input", optional=True),
        "quant_out": Tensor(_ROWS, dtype="float8_e4m3fn", optional=True),
        "scale_out": Tensor(("num_tokens", "one"), dtype="float32", optional=True),
    },
    name_prefix="allreduce_fusion",
    reference=_allreduce_fusion_reference,
    init=_allreduce_fusion_init,
    description="The sum over ranks, with residual, RMS norm and quantisation after it.",
)
