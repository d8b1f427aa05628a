# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``flashinfer.norm.fused_add_rmsnorm_fp8_block_quant``."""

from __future__ import annotations

from typing import Any

import torch

from ..check import default_check
from ..template import Const, Scalar, Tensor, TraceTemplate, Var
from .shared import fp8_check, normal, normalize, seeded, to_fp8

__all__ = ["fused_add_rmsnorm_fp8_block_quant_trace"]


def _reference(
    block_scale: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Columns of ``block_scale`` beyond the rows keep what they had."""
    total = input.double() + residual.double()
    normed = (normalize(total, eps) * weight.double()).to(input.dtype)
    blocks = normed.float().unflatten(1, (-1, 128))
    amax = blocks.abs().amax(dim=2)
    q = torch.where(amax == 0, torch.ones_like(amax), torch.full_like(amax, 448.0) / amax)
    scales = block_scale.clone()
    scales[:, : input.shape[0]] = q.reciprocal().t()
    return to_fp8((blocks * q.unsqueeze(2)).flatten(1), torch.float8_e4m3fn), scales, normed, total.to(input.dtype)


def _check(reference_outputs: Any, actual_outputs: Any, **limits: Any) -> bool:
    if len(reference_outputs) != len(actual_outputs):
        return False
    values = [list(x.values()) if isinstance(x, dict) else list(x) for x in (reference_outputs, actual_outputs)]
    codes, scales, *rest = zip(*values, strict=True)
    # A norm near the middle of two neighbours may fall to either side: of the largest of a block, by 2^-8 in bfloat16.
    return (
        fp8_check(*codes, **{"max_mismatch_pct": 2.0, **limits})
        and default_check(*scales, **{"rtol": 2**-7, **limits})
        and all(default_check(*pair, **limits) for pair in rest)
    )


def _init(
    *,
    batch_size: int,
    hidden_size: int = 4096,
    padded_batch_size: int = 0,
    device: Any = "cuda",
    seed: int = 0,
    **_: Any,
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "out": torch.empty(batch_size, hidden_size, dtype=torch.float8_e4m3fn, device=device),
        "block_scale": torch.zeros(hidden_size // 128, (batch_size + 3) // 4 * 4, device=device),
        "normed_out": torch.empty(batch_size, hidden_size, dtype=torch.bfloat16, device=device),
        "input": normal(g, batch_size, hidden_size),
        "residual": normal(g, batch_size, hidden_size),
        "weight": normal(g, hidden_size),
    }


_MATRIX, _SCALES = ("batch_size", "hidden_size"), ("num_blocks", "padded_batch_size")

fused_add_rmsnorm_fp8_block_quant_trace = TraceTemplate(
    "rmsnorm",
    axes={
        "batch_size": Var("rows"),
        "padded_batch_size": Var("columns of the scales: rows, or rows rounded up to a multiple of 4"),
        "hidden_size": Const(abbrev="h"),
        "num_blocks": Const("blocks of 128 columns", abbrev=""),
    },
    inputs={
        "block_scale": Tensor(_SCALES, dtype="float32", description="written; columns beyond the rows are kept"),
        "input": Tensor(_MATRIX),
        "residual": Tensor(_MATRIX, description="written"),
        "weight": Tensor(("hidden_size",)),
        "eps": Scalar(optional=True),
    },
    outputs={
        "quantized": Tensor(_MATRIX, param="out", dtype="float8_e4m3fn"),
        "scale": Tensor(_SCALES, param="block_scale", dtype="float32"),
        "normed": Tensor(_MATRIX, param="normed_out", dtype_from="input"),
        "sum": Tensor(_MATRIX, param="residual", dtype_from="input"),
    },
    constraints=["num_blocks * 128 == hidden_size"],
    name_prefix="fused_add_rmsnorm_fp8_block_quant",
    reference=_reference,
    init=_init,
    check=_check,
    description="Residual sum, its RMSNorm, and the norm in e4m3 with a scale for 128 columns of a row.",
)
