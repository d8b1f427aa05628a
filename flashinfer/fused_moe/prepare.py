# SPDX-License-Identifier: Apache-2.0
"""Weights of experts in the form of a backend, computed by torch on any device."""

from __future__ import annotations

from typing import Any, Optional

import torch

from .._runtime.errors import ArgumentError
from .formats import ActivationConfig
from .mixed_weights import (
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
    preprocess_moe_weights_for_sm90_mixed_gemm_humming,
)

__all__ = [
    "fp8_tensor_activations",
    "prepare_bf16_weights",
    "prepare_fp8_block_weights",
    "prepare_fp8_tensor_weights",
    "prepare_humming_weights",
    "prepare_w4a8_weights",
    "prepare_w4a16_weights",
]

_GROUP = 32
_E4M3_MAX = 448.0
#: Magnitudes halfway between neighbouring e2m1 numbers 0, .5, 1, 1.5, 2, 3, 4, 6.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


Sizes = tuple[int, int, int]  # experts, hidden size, intermediate size


def _check(
    op: str, w1: torch.Tensor, w2: torch.Tensor, sizes: Sizes, activation: Optional[ActivationConfig], block: int = 1
) -> None:
    experts, hidden_size, intermediate_size = sizes
    halves = 2 if activation is None or activation.is_gated else 1
    shapes = {
        "w1_bf16": (experts, halves * intermediate_size, hidden_size),
        "w2_bf16": (experts, hidden_size, intermediate_size),
    }
    for (name, shape), weights in zip(shapes.items(), (w1, w2), strict=True):
        if weights.dtype != torch.bfloat16:
            raise TypeError(f"{op}: {name} must be torch.bfloat16, as it expects BF16 weights, got {weights.dtype}")
        if tuple(weights.shape) != shape:
            raise ArgumentError(f"{op}: {name} must be {shape}, got {tuple(weights.shape)}")
    if hidden_size % block or intermediate_size % block:
        raise ArgumentError(
            f"{op}: hidden_size and intermediate_size must be divisible by {block}, got {hidden_size} and "
            f"{intermediate_size}"
        )


View = dict[str, torch.Tensor]


def prepare_bf16_weights(
    op: str, w1: torch.Tensor, w2: torch.Tensor, sizes: Sizes, activation: Any, device: Any
) -> View:
    """Return bfloat16 weights as ``cutlass_fused_moe`` takes them."""
    _check(op, w1, w2, sizes, activation)
    return {"fc1_expert_weights": w1.to(device).contiguous(), "fc2_expert_weights": w2.to(device).contiguous()}


def _scale_tensor(op: str, name: str, scale: Any, device: Any) -> torch.Tensor:
    made = torch.as_tensor(scale, dtype=torch.float32).to(device)
    if made.numel() != 1:
        raise ArgumentError(f"{op}: {name} must be a number or a tensor of one element, got {tuple(made.shape)}")
    return made.reshape(())


def _saturated(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def fp8_tensor_activations(op: str, hidden_states: torch.Tensor, scale: Any) -> torch.Tensor:
    """Return ``e4m3(hidden_states * scale)``."""
    if hidden_states.dtype != torch.bfloat16:
        raise TypeError(f"{op}: hidden_states_bf16 must be torch.bfloat16, got {hidden_states.dtype}")
    factor = _scale_tensor(op, "hidden_states_scale_global", scale, hidden_states.device)
    return _saturated(hidden_states.float() * factor)


def prepare_fp8_tensor_weights(
    op: str,
    w1: torch.Tensor,
    w2: torch.Tensor,
    sizes: Sizes,
    activation: Any,
    device: Any,
    hidden_states_scale_global: Any,
    intermediate_scale_global: Any,
) -> View:
    """Return e4m3 weights with one scale per expert, and the factors of both sums and of the hidden values."""
    _check(op, w1, w2, sizes, activation)
    device = w1.device if device is None else device
    of_tokens = _scale_tensor(op, "hidden_states_scale_global", hidden_states_scale_global, device)
    of_hidden = _scale_tensor(op, "intermediate_scale_global", intermediate_scale_global, device)
    view = {}
    for name, weights, of_rows in (("fc1", w1, of_tokens), ("fc2", w2, of_hidden)):
        values = weights.to(device).float()
        amax = values.abs().amax(dim=(1, 2))
        factor = torch.where(amax == 0, torch.ones_like(amax), _E4M3_MAX / amax)
        view[f"{name}_expert_weights"] = _saturated(values * factor.view(-1, 1, 1))
        view[f"{name}_dequant"] = (factor * of_rows).reciprocal()
    return {**view, "fc2_quant": of_hidden, "fc1_input_dequant": of_tokens.reciprocal()}


def prepare_fp8_block_weights(
    op: str, w1: torch.Tensor, w2: torch.Tensor, sizes: Sizes, activation: Any, device: Any
) -> View:
    """Return e4m3 weights with the scales of their 128 x 128 blocks, amax / 448."""
    _check(op, w1, w2, sizes, activation, 128)
    view = {}
    for name, weights in (("fc1", w1), ("fc2", w2)):
        blocks = weights.to(device).float().unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
        amax = blocks.abs().amax(dim=(2, 4), keepdim=True)
        scale = torch.where(amax == 0, torch.ones_like(amax), amax / _E4M3_MAX)
        view[f"{name}_expert_weights"] = _saturated(blocks / scale).flatten(3, 4).flatten(1, 2)
        view[f"{name}_expert_scales"] = scale.squeeze(4).squeeze(2).contiguous()
    return view


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
    op: str, w1: torch.Tensor, w2: torch.Tensor, sizes: Sizes, activation: Any, device: Any
) -> View:
    """Return bfloat16 weights as MXFP4, packed and interleaved as ``cutlass_fused_moe`` takes them."""
    _check(op, w1, w2, sizes, activation, 128)
    view = {}
    for name, weights in (("fc1", w1), ("fc2", w2)):
        codes, scale = _quantize_mxfp4_linear(weights.to(device))
        view[f"{name}_expert_weights"] = interleave_moe_weights_for_sm90_mixed_gemm(codes.contiguous(), "fp4")
        view[f"{name}_expert_scales"] = interleave_moe_scales_for_sm90_mixed_gemm(scale, _GROUP)
    return view


def prepare_humming_weights(
    op: str, w1: torch.Tensor, w2: torch.Tensor, sizes: Sizes, activation: Any, device: Any
) -> View:
    """Return bfloat16 weights as MXFP4 whose exponents lie close enough for e4m3, and the factor of each expert."""
    _check(op, w1, w2, sizes, activation, 128)
    view = {}
    for name, weights in (("fc1", w1), ("fc2", w2)):
        fp4, scale = _quantize_mxfp4_linear(weights.to(device))
        codes, offset, residual = preprocess_moe_weights_for_sm90_mixed_gemm_humming(fp4.contiguous(), scale)
        view[f"{name}_expert_weights"] = codes
        view[f"{name}_expert_scales"] = offset.view(torch.int32)
        view[f"{name}_dequant"] = residual * 64
    return view


def prepare_w4a8_weights(
    op: str, w1: torch.Tensor, w2: torch.Tensor, sizes: Sizes, activation: Any, device: Any
) -> View:
    """Return bfloat16 weights as int4 with a bfloat16 scale for 128 columns of a row: ``amax / 7``.

    Activations are rounded to e4m3 as they are: their factors are 1.
    """
    _check(op, w1, w2, sizes, activation, 128)
    view = {}
    for name, weights in (("fc1", w1), ("fc2", w2)):
        groups = weights.to(device).float().unflatten(2, (-1, 128))
        scale = (groups.abs().amax(dim=3) / 7).to(torch.bfloat16)
        safe = torch.where(scale == 0, torch.ones_like(scale), scale).float()
        codes = (groups / safe.unsqueeze(3)).round().clamp(-8, 7).to(torch.int32).flatten(2).bitwise_and(15)
        packed = (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
        view[f"{name}_expert_weights"] = interleave_moe_weights_for_sm90_mixed_gemm(packed, "int4")
        view[f"{name}_expert_scales"] = interleave_moe_scales_for_sm90_mixed_gemm(scale, 128)
        view[f"{name}_act_scale"] = torch.ones(weights.shape[2], dtype=torch.bfloat16, device=packed.device)
        view[f"{name}_alpha"] = torch.ones(weights.shape[0], device=packed.device)
    return view
