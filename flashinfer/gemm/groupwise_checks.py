# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of block-scaled fp8 products; the published error texts are kept."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch

from .._runtime.checks import is_float8
from .._runtime.errors import ArgumentError
from .._runtime.integer_math import ceil_div

__all__ = [
    "check_counts",
    "check_deepgemm",
    "check_float8",
    "check_granularity",
    "check_major",
    "check_out",
    "check_scale",
]

_OUTPUTS = (torch.bfloat16, torch.float16)
_E4M3 = torch.float8_e4m3fn


def check_float8(op: str, **operands: torch.Tensor) -> None:
    for name, x in operands.items():
        if not is_float8(x):
            raise ArgumentError(f"{op}: {name} must be a float8 tensor (float8_e4m3fn or float8_e5m2), got {x.dtype}")


def check_granularity(op: str, granularity: Sequence[int]) -> None:
    if len(granularity) != 3 or any(not isinstance(step, int) or step < 1 for step in granularity):
        raise ArgumentError(f"{op}: scale_granularity_mnk must be three positive integers, got {tuple(granularity)}")


def check_major(op: str, scale_major_mode: Any) -> None:
    if scale_major_mode not in ("MN", "K"):
        raise ArgumentError(f"{op}: scale_major_mode must be either 'MN' or 'K', got {scale_major_mode!r}")


def check_scale(
    op: str, name: str, scale: torch.Tensor, of: torch.Tensor, rows: int, depth: int, scale_major_mode: str
) -> None:
    """Check the dtype and the shape of the scales of ``of``: one per ``rows`` by ``depth`` elements."""
    if scale.dtype is not torch.float32:
        raise ArgumentError(f"{op}: {name} must be a float32 tensor, got {scale.dtype}")
    *batch, m, k = of.shape
    blocks = (ceil_div(m, rows), ceil_div(k, depth))
    expected = (*batch, *(blocks if scale_major_mode == "K" else blocks[::-1]))
    if tuple(scale.shape) != expected:
        raise ArgumentError(
            f"{op}: Shape mismatch: {name} must have shape {expected} (scale_major_mode {scale_major_mode!r}, blocks "
            f"of {rows} x {depth}), got {tuple(scale.shape)}"
        )


def check_out(
    op: str, a: torch.Tensor, shape: tuple[int, ...], out: Optional[torch.Tensor], out_dtype: Optional[torch.dtype]
) -> None:
    dtype = out.dtype if out is not None else out_dtype
    if dtype is not None and dtype not in _OUTPUTS:
        raise ArgumentError(
            f"{op}: Unsupported output dtype: out and out_dtype must be torch.bfloat16 or torch.float16, got {dtype}"
        )
    if out is None:
        return
    if tuple(out.shape) != shape:
        raise ArgumentError(f"{op}: Shape mismatch: out must have shape {shape}, got {tuple(out.shape)}")
    if out.device != a.device:
        raise ArgumentError(f"{op}: out must be on {a.device}, got {out.device}")


def check_counts(op: str, name: str, counts: torch.Tensor, a: torch.Tensor) -> None:
    """Check the numbers of a group or a row: int32, one for each first index of ``a``."""
    if counts.dtype is not torch.int32:
        raise ArgumentError(f"{op}: {name} must be int32, got {counts.dtype}")
    if counts.shape != a.shape[:1] or not counts.is_contiguous():
        raise ArgumentError(
            f"{op}: {name} must be contiguous with shape {tuple(a.shape[:1])}, got shape {tuple(counts.shape)} "
            f"and strides {counts.stride()}"
        )


def _check_k_major(op: str, name: str, x: torch.Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ArgumentError(
            f"{op}: major_{name} must be KMajor ({name} contiguous in its last dimension), got strides {x.stride()}"
        )


def check_deepgemm(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    granularity: Sequence[int],
    out: Optional[torch.Tensor],
    out_dtype: Optional[torch.dtype],
) -> None:
    """Check what the contiguous and the masked product share. The result is called ``d``, as published.

    Devices are checked by the native function.
    """
    for name, x in (("a", a), ("b", b)):
        if x.dtype is not _E4M3:
            raise ArgumentError(f"{op}: {name} must be float8_e4m3fn, got {x.dtype}")
        _check_k_major(op, name, x)
    if tuple(granularity) != (1, 128, 128):
        raise ArgumentError(f"{op}: scale_granularity_mnk must be (1, 128, 128), got {tuple(granularity)}")
    if b.ndim != 3:
        raise ArgumentError(f"{op}: b must have shape (groups, n, k), got {tuple(b.shape)}")
    if a.shape[-1] != b.shape[-1]:
        raise ArgumentError(f"{op}: a and b must have the same k, got {a.shape[-1]} and {b.shape[-1]}")
    check_scale(op, "a_scale", a_scale, a, 1, 128, "K")
    check_scale(op, "b_scale", b_scale, b, 128, 128, "K")
    check_out(op, a, (*a.shape[:-1], b.shape[1]), out, out_dtype)
    dtype = out.dtype if out is not None else out_dtype
    if dtype is not None and dtype is not torch.bfloat16:
        raise ArgumentError(f"{op}: d must be bfloat16 (out, out_dtype), got {dtype}")
    if out is not None and out.stride(-1) != 1 and out.shape[-1] > 1:
        raise ArgumentError(f"{op}: d must be row-major (out), got strides {out.stride()}")
