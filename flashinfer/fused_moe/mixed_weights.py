# SPDX-License-Identifier: Apache-2.0
"""Preparation of four-bit expert weights for ``cutlass_fused_moe``, computed by torch once per model, on any device."""

from __future__ import annotations

import torch

from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors

__all__ = [
    "interleave_moe_scales_for_sm90_mixed_gemm",
    "interleave_moe_weights_for_sm90_mixed_gemm",
    "preprocess_moe_weights_for_sm90_mixed_gemm_humming",
]

_TYPES = ("fp4", "fp4_fp8", "int4")
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # numbers that e2m1 codes stand for
#: Positions in a 16-bit word of the bits of each of its four codes, highest bit first, as in gemm/w4_layout.h.
_E2M1_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (14, 11, 10, 9), (13, 2, 1, 0))
_INT4_BITS = ((3, 2, 1, 0), (7, 6, 5, 4), (11, 10, 9, 8), (15, 14, 13, 12))
#: Positions in a 32-bit word of the signs of codes that become e4m3.
_SHIFTED_SIGNS = (3, 11, 19, 27, 7, 15, 23, 31)


def _to_fragments(packed: torch.Tensor, bits: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """Reorder one matrix ``(n, k / 2)`` to the fragments of gemm/w4_layout.h.

    References of traces undo it (trace/templates/fused_moe_w4_layout.py).
    """
    n, columns = packed.shape[0], packed.shape[1] * 2
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(n, columns)
    # Row 16 a + 8 b + c, column 64 d + 16 e + 8 f + 2 g + h: block (a, d), lane (c, g), word e, half h, code (f, b).
    split = codes.view(n // 16, 2, 8, columns // 64, 4, 2, 4, 2).permute(0, 3, 2, 6, 4, 7, 5, 1)
    halves = torch.zeros(split.shape[:-2], dtype=torch.int32, device=packed.device)
    for code, positions in zip(split.flatten(-2).unbind(-1), bits, strict=True):
        for i, position in enumerate(positions):
            halves |= ((code >> (3 - i)) & 1).int() << position
    return torch.stack((halves & 255, halves >> 8), dim=-1).to(torch.uint8).view(packed.shape)


def _to_byte_fragments(packed: torch.Tensor) -> torch.Tensor:
    """Reorder one matrix ``(n, k / 2)`` of e2m1 codes to the fragments of gemm/w4_layout.h that become e4m3."""
    n, columns = packed.shape[0], packed.shape[1] * 2
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(n, columns)
    # Row 16 a + 8 b + c, column 64 d + 32 e + 16 f + 4 g + h: block (a, d), lane (c, g), word (e, b), code (f, h).
    split = codes.view(n // 16, 2, 8, columns // 64, 2, 2, 4, 4).permute(0, 3, 2, 6, 4, 1, 5, 7)
    words = torch.zeros(split.shape[:-2], dtype=torch.int32, device=packed.device)
    for i, code in enumerate(split.flatten(-2).int().unbind(-1)):
        words |= (code & 7) << 4 * i | (code >> 3) << _SHIFTED_SIGNS[i]
    return words.unsqueeze(-1).view(torch.uint8).view(packed.shape)


@explain_type_errors
def interleave_moe_weights_for_sm90_mixed_gemm(weight: torch.Tensor, quant_type: str = "fp4") -> torch.Tensor:
    """Copy four-bit weights to the order in which the kernels of ``cutlass_fused_moe`` read them.

    The order is private: callers pass the result on and do not look into it. It is that of the registers of tensor
    cores (include/flashinfer/gemm/w4_layout.h).

    Parameters
    ----------
    weight : torch.Tensor
        ``(E, n, k / 2)`` uint8, the even element in the low nibble; n is a multiple of 16 and k of 64.
    quant_type : str
        "fp4" (MXFP4 with 16-bit activations), "fp4_fp8" (MXFP4 with e4m3 activations) or "int4".

    Returns
    -------
    torch.Tensor
        A new tensor of the same shape.
    """
    op = "interleave_moe_weights_for_sm90_mixed_gemm"
    if weight.ndim != 3:
        raise ArgumentError(f"{op}: weight must be 3D, got shape {tuple(weight.shape)}")
    if weight.dtype is not torch.uint8:
        raise ArgumentError(f"{op}: weight must be uint8, got {weight.dtype}")
    if quant_type not in _TYPES:
        raise ArgumentError(f"{op}: quant_type must be one of {', '.join(_TYPES)}, got {quant_type!r}")
    if weight.shape[1] % 16 or weight.shape[2] % 32:
        raise ArgumentError(f"{op}: n must be divisible by 16 and k by 64, got shape {tuple(weight.shape)}")
    out = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for expert, matrix in enumerate(weight):
        if quant_type == "fp4_fp8":
            out[expert] = _to_byte_fragments(matrix)
        else:
            out[expert] = _to_fragments(matrix, _INT4_BITS if quant_type == "int4" else _E2M1_BITS)
    return out


@explain_type_errors
def interleave_moe_scales_for_sm90_mixed_gemm(scales: torch.Tensor, group_size: int = 32) -> torch.Tensor:
    """Copy scales of four-bit weights to blocks of 64 rows by 128 columns of weights.

    Parameters
    ----------
    scales : torch.Tensor
        ``(E, rows, K / group_size)``, one or two bytes per scale; rows is a multiple of 64 and K of 128.
    group_size : int
        Weights along K that share a scale; divides 128.

    Returns
    -------
    torch.Tensor
        ``(E, rows / 64, K / 128, f, c)`` with c = 16 bytes of scales and f = 64 * (128 / group_size) / c. The scale of
        row ``64 b + s f + i`` and group ``q (128 / group_size) + g`` is at ``[e, b, q, i, s (128 / group_size) + g]``.
    """
    op = "interleave_moe_scales_for_sm90_mixed_gemm"
    if scales.ndim != 3:
        raise ArgumentError(f"{op}: scales must be 3D, got shape {tuple(scales.shape)}")
    if group_size < 1 or 128 % group_size:
        raise ArgumentError(f"{op}: group_size must be positive and divide 128, got {group_size}")
    per_block, c = 128 // group_size, 16 // scales.element_size()
    if scales.element_size() not in (1, 2) or c % per_block:
        raise ArgumentError(
            f"{op}: unsupported element size: scales must have 1 or 2 bytes, and {per_block} of them must divide 16 "
            f"bytes, got {scales.element_size()}"
        )
    experts, rows, groups = scales.shape
    if rows % 64:
        raise ArgumentError(f"{op}: rows must be divisible by 64, got {rows}")
    if groups % per_block:
        raise ArgumentError(f"{op}: K/group_size={groups} must be divisible by 128/group_size = {per_block}")
    strips = c // per_block
    split = scales.reshape(experts, rows // 64, strips, 64 // strips, groups // per_block, per_block)
    folded = split.permute(0, 1, 4, 3, 2, 5)  # expert, block, q, i, s, g
    return folded.reshape(experts, rows // 64, groups // per_block, 64 // strips, c).contiguous()


def _shifted_codes(largest: int, device: torch.device) -> torch.Tensor:
    """Return ``(largest + 1, 16)`` uint8: each e2m1 code divided by 2^shift, rounded; ties go to the larger value."""
    magnitudes = torch.tensor(_MAGNITUDES)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    table = torch.empty(largest + 1, 16, dtype=torch.uint8)
    for shift in range(largest + 1):
        nearest = torch.bucketize(magnitudes * 2.0**-shift, middles, right=True).to(torch.uint8)
        table[shift, :8], table[shift, 8:] = nearest, nearest + 8
    table[:, 8] = 0  # minus zero is zero; a negative value that rounds to zero keeps its sign
    return table.to(device)


@explain_type_errors
def preprocess_moe_weights_for_sm90_mixed_gemm_humming(
    weight: torch.Tensor, raw_scale: torch.Tensor, max_range: int = 11, *, interleave: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewrite MXFP4 weights so that each is an e4m3 number times one factor per expert.

    The exponents of an expert that lie more than ``max_range`` below its largest are raised, and their codes divided
    and rounded.

    Parameters
    ----------
    weight : torch.Tensor
        ``(E, n, k / 2)`` uint8, the even element in the low nibble.
    raw_scale : torch.Tensor
        ``(E, n, k / 32)`` uint8: s is 2^(s - 127).
    max_range : int
        0 to 11.
    interleave : bool
        Apply both interleave functions to the results.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        Weights, offsets of exponents (1 to 12, of the shape of ``raw_scale`` or interleaved), and float32 ``(E,)``
        residuals, which ``cutlass_fused_moe`` takes times 64.
    """
    op = "preprocess_moe_weights_for_sm90_mixed_gemm_humming"
    if not 0 <= max_range <= 11:
        raise ArgumentError(f"{op}: max_range must be from 0 to 11, got {max_range}")
    if weight.ndim != 3 or weight.dtype is not torch.uint8:
        raise ArgumentError(f"{op}: weight must be 3D and uint8, got shape {tuple(weight.shape)}, {weight.dtype}")
    experts, n, packed = weight.shape
    if raw_scale.shape != (experts, n, packed // 16) or raw_scale.dtype is not torch.uint8 or packed % 16:
        raise ArgumentError(
            f"{op}: raw_scale must be uint8 with one scale per 32 weights, of shape {(experts, n, packed // 16)}, got "
            f"shape {tuple(raw_scale.shape)}, {raw_scale.dtype}"
        )
    scale = raw_scale.to(torch.int32)
    largest, smallest = scale.amax(dim=(1, 2), keepdim=True), scale.amin(dim=(1, 2), keepdim=True)
    base = largest - (largest - smallest).clamp(max=max_range)
    raised = torch.maximum(scale, base)
    offset = ((raised - base + 1) & 0xF).to(torch.uint8)
    shift = (raised - scale).clamp(max=15).repeat_interleave(16, dim=2).long()  # 6 * 2^-15 is zero
    table = _shifted_codes(15, weight.device)
    low, high = table[shift, (weight & 15).long()], table[shift, (weight >> 4).long()]
    residual = torch.exp2((base.view(-1) - 127).float()) * 0.5
    codes = low | (high << 4)
    if not interleave:
        return codes, offset, residual
    return (
        interleave_moe_weights_for_sm90_mixed_gemm(codes, "fp4_fp8"),
        interleave_moe_scales_for_sm90_mixed_gemm(offset),
        residual,
    )
