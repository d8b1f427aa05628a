# SPDX-License-Identifier: Apache-2.0
"""Weights of experts in the form of a backend, computed by torch on any device."""

from __future__ import annotations

from typing import Any

import torch

from .._runtime.errors import ArgumentError
from .mixed_weights import interleave_moe_scales_for_sm90_mixed_gemm, interleave_moe_weights_for_sm90_mixed_gemm

__all__ = ["prepare_bf16_weights", "prepare_w4a16_weights"]

_GROUP = 32
#: Magnitudes halfway between neighbouring e2m1 numbers 0, .5, 1, 1.5, 2, 3, 4, 6.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _check(op: str, w1: torch.Tensor, w2: torch.Tensor, experts: int, hidden_size: int, intermediate_size: int) -> None:
    shapes = {
        "w1_bf16": (experts, 2 * intermediate_size, hidden_size),
        "w2_bf16": (experts, hidden_size, intermediate_size),
    }
    for (name, shape), weights in zip(shapes.items(), (w1, w2), strict=True):
        if weights.dtype != torch.bfloat16:
            raise TypeError(f"{op}: {name} must be torch.bfloat16, got {weights.dtype}")
        if tuple(weights.shape) != shape:
            raise ArgumentError(f"{op}: {name} must be {shape}, got {tuple(weights.shape)}")


def prepare_bf16_weights(
    w1: torch.Tensor, w2: torch.Tensor, experts: int, hidden_size: int, intermediate_size: int, device: Any = None
) -> dict[str, torch.Tensor]:
    """Return bfloat16 weights as ``cutlass_fused_moe`` takes them."""
    _check("CutlassBf16Config.prepare_weights", w1, w2, experts, hidden_size, intermediate_size)
    return {"fc1_expert_weights": w1.to(device).contiguous(), "fc2_expert_weights": w2.to(device).contiguous()}


def _quantize_mxfp4_linear(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``(..., k)`` to e2m1 codes ``(..., k / 2)``, low nibble first, and scale bytes ``(..., k / 32)``.

    The exponent of 32 numbers is ``ceil(log2(amax / 6))``; ties between two codes go to the smaller magnitude.
    """
    blocks = w.float().unflatten(-1, (-1, _GROUP))
    amax = blocks.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax / 6)  # amax / 6 = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)  # ceil(log2), exactly
    is_zero = amax == 0
    scale = torch.where(is_zero, torch.zeros_like(exponent), exponent + 127).to(torch.uint8)
    scaled = torch.ldexp(blocks, -exponent.unsqueeze(-1))
    midpoints = torch.tensor(_MIDPOINTS, device=w.device)
    codes = torch.bucketize(scaled.abs().contiguous(), midpoints)  # equal to a midpoint: the lower code
    codes = torch.where(scaled < 0, codes + 8, codes)
    codes = torch.where(is_zero.unsqueeze(-1), torch.zeros_like(codes), codes).flatten(-2).to(torch.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4), scale


def prepare_w4a16_weights(
    w1: torch.Tensor, w2: torch.Tensor, experts: int, hidden_size: int, intermediate_size: int, device: Any = None
) -> dict[str, torch.Tensor]:
    """Return bfloat16 weights as MXFP4, packed and interleaved as ``cutlass_fused_moe`` takes them."""
    op = "CutlassW4A16Config.prepare_weights"
    _check(op, w1, w2, experts, hidden_size, intermediate_size)
    if hidden_size % 128 or intermediate_size % 128:
        raise ArgumentError(
            f"{op}: hidden_size and intermediate_size must be multiples of 128, got {hidden_size} and "
            f"{intermediate_size}"
        )
    view = {}
    for name, weights in (("fc1", w1), ("fc2", w2)):
        codes, scale = _quantize_mxfp4_linear(weights.to(device))
        view[f"{name}_expert_weights"] = interleave_moe_weights_for_sm90_mixed_gemm(codes.contiguous(), "fp4")
        view[f"{name}_expert_scales"] = interleave_moe_scales_for_sm90_mixed_gemm(scale, _GROUP)
    return view
