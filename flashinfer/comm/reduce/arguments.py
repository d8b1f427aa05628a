# SPDX-License-Identifier: Apache-2.0
"""Arguments of the fused all-reduce that are more than a tensor: sums over experts, groups of scales, FP4."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..._runtime.errors import ArgumentError
from .types import AllReduceFusionPattern as P
from .types import QuantizationSFLayout as Layout

__all__ = ["fp4_outputs", "group_of", "moe_rows"]

OP = "allreduce_fusion"
_FP4_BLOCK = 16  # columns that share a scale


def moe_rows(
    pattern: int,
    input: torch.Tensor,
    reduction: dict[str, Optional[torch.Tensor]],
    index: Optional[torch.Tensor],
    weights: Optional[torch.Tensor],
    shared: Optional[torch.Tensor],
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the rows whose weighted sums are pushed, as a matrix, and how they are summed."""
    if pattern == P.kMoEFinalizeARResidualRMSNorm:
        if index is None:
            raise ArgumentError(f"{OP}: expanded_idx_to_permuted_idx is required for pattern 7, got None")
        return input, {"index": index, "weights": weights, "add": shared}
    for name, tensor in reduction.items():
        if tensor is None:
            raise ArgumentError(f"{OP}: {name} is required for pattern 6, got None")
    scale, active, token = reduction.values()
    assert active is not None
    return active.reshape(-1, active.shape[-1]), {"weights": scale, "add": token}


def group_of(input: torch.Tensor, scale_out: Optional[torch.Tensor], group: Optional[int]) -> int:
    """Return the columns that share a scale, after checks of the packed scales."""
    if group is None:
        raise ArgumentError(f"{OP}: block_quant_group_size is required for patterns 8 and 9, got None")
    if group <= 0:
        raise ArgumentError(f"{OP}: block_quant_group_size must be > 0, got {group}")
    tokens, hidden = input.shape
    if hidden % group:
        raise ArgumentError(f"{OP}: input.shape[1] must be divisible by block_quant_group_size {group}, got {hidden}")
    assert scale_out is not None
    shape, stride = (tokens, -(-hidden // group // 4)), (1, -(-tokens // 4) * 4)
    if scale_out.dtype != torch.int32:
        raise ArgumentError(f"{OP}: scale_out dtype must be torch.int32, got {scale_out.dtype}")
    if tuple(scale_out.shape) != shape:
        raise ArgumentError(f"{OP}: scale_out shape must be {shape}, got {tuple(scale_out.shape)}")
    if tokens > 0 and scale_out.stride() != stride:
        raise ArgumentError(f"{OP}: scale_out stride must be {stride}, got {scale_out.stride()}")
    return group


def _scale_bytes(tokens: int, columns: int, layout: int) -> int:
    """Return the bytes of the scales of ``(tokens, columns)`` blocks, padding included."""
    if layout == Layout.LINEAR:
        return tokens * columns
    rows = 128 if layout == Layout.SWIZZLED_128x4 else 8
    return -(-tokens // rows) * rows * (-(-columns // 4) * 4)


def fp4_outputs(
    rows: torch.Tensor, quant_out: torch.Tensor, scale_out: Optional[torch.Tensor], layout_code: Optional[int]
) -> dict[str, Any]:
    """Return codes and scales as bytes, and the order of the scales; ``rows`` has the shape of the norm."""
    tokens, hidden = rows.shape
    layout = Layout.SWIZZLED_128x4 if layout_code is None else layout_code
    if rows.dtype not in (torch.float16, torch.bfloat16):
        raise ArgumentError(f"{OP}: input must be float16 or bfloat16 for FP4 outputs, got {rows.dtype}")
    if layout not in (Layout.SWIZZLED_128x4, Layout.SWIZZLED_8x4, Layout.LINEAR):
        raise ArgumentError(f"{OP}: layout_code must be 0 (128x4), 1 (8x4) or 2 (linear), got {layout_code!r}")
    if hidden % _FP4_BLOCK:
        raise ArgumentError(f"{OP}: input.shape[1] must be divisible by {_FP4_BLOCK} for FP4 outputs, got {hidden}")
    if scale_out is None:
        raise ArgumentError(f"{OP}: scale_out is required for FP4 outputs, got None")
    size = _scale_bytes(tokens, hidden // _FP4_BLOCK, layout)
    found = {}
    for name, x, least, most in (
        ("quant_out", quant_out, tokens * hidden // 2, tokens * hidden // 2),
        ("scale_out", scale_out, size, 1 << 62),
    ):
        if not x.is_contiguous():
            raise ArgumentError(f"{OP}: {name} must be contiguous, got strides {x.stride()}")
        if not least <= x.numel() * x.element_size() <= most:
            raise ArgumentError(f"{OP}: {name} must have {least} bytes, got {x.numel() * x.element_size()}")
        found[name] = x.view(-1).view(torch.uint8)
    return {"fp4_out": found["quant_out"], "fp4_scales": found["scale_out"], "fp4_layout": layout}
