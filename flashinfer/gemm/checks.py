# SPDX-License-Identifier: Apache-2.0
"""Errors of the dense products. The public functions word them only after a cheap test of all arguments has failed."""

from __future__ import annotations

from typing import Optional, Sequence

import torch

from .._runtime.errors import ArgumentError

__all__ = ["refuse_output", "refuse_shapes", "spell"]


def spell(dtypes: Sequence[torch.dtype]) -> str:
    names = [str(dtype) for dtype in dtypes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def refuse_shapes(op: str, names: tuple[str, str], a: torch.Tensor, b: torch.Tensor, rank: int) -> None:
    """Raise for operands that do not multiply: ``(.., m, k)`` and ``(.., k, n)`` of ``rank`` dimensions."""
    for name, x in zip(names, (a, b), strict=True):
        if x.ndim != rank:
            raise ArgumentError(f"{op}: {name} must be {rank}D, got shape {tuple(x.shape)}")
    if a.shape[:-2] != b.shape[:-2]:
        raise ArgumentError(f"{op}: {names[0]} and {names[1]} must be batches of one size, got {_both(a, b)}")
    if a.shape[-1] != b.shape[-2]:
        raise ArgumentError(
            f"{op}: K dimension mismatch: {names[1]}.shape[-2] must be {names[0]}.shape[-1], got {_both(a, b)}"
        )
    if a.device != b.device:
        raise ArgumentError(f"{op}: {names[1]} must be on {a.device}, the device of {names[0]}, got {b.device}")


def _both(a: torch.Tensor, b: torch.Tensor) -> str:
    return f"{tuple(a.shape)} and {tuple(b.shape)}"


def refuse_output(
    op: str,
    out: Optional[torch.Tensor],
    shape: Sequence[int],
    device: torch.device,
    out_dtype: torch.dtype,
    dtypes: Sequence[torch.dtype],
) -> None:
    """Raise for an output of another shape, device or dtype, or for a dtype that the op does not write."""
    if out_dtype not in dtypes:
        raise ArgumentError(f"{op}: Unsupported output dtype: out_dtype must be {spell(dtypes)}, got {out_dtype}")
    if out is None:
        return
    if tuple(out.shape) != tuple(shape):
        raise ArgumentError(f"{op}: Output shape mismatch: out must be {tuple(shape)}, got {tuple(out.shape)}")
    if out.device != device:
        raise ArgumentError(f"{op}: Output device mismatch: out must be on {device}, got {out.device}")
    if out.dtype != out_dtype:
        raise ArgumentError(f"{op}: Output dtype mismatch: out must be {out_dtype}, got {out.dtype}")
