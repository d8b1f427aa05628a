# SPDX-License-Identifier: Apache-2.0
"""Errors of the dense products. The public functions word them only after a cheap test of all arguments has failed."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch

from .._runtime.errors import ArgumentError

__all__ = ["refuse_output", "refuse_shapes", "refuse_shared_memory", "serves_all", "spell"]


def serves_all(*_: Any) -> bool:
    """Return True: a backend takes every call that the common check has let through."""
    return True


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


def refuse_shared_memory(op: str, out: torch.Tensor, **inputs: Optional[torch.Tensor]) -> None:
    """Raise for an output over an input, or with elements over each other, as our kernels do: torch would not.

    ``Expect::apart`` and ``Expect::distinct`` of csrc/tvm_ffi_utils.h are the same checks.
    """
    if not out.numel():
        return
    span = 1
    for size, stride, dim in sorted(zip(out.shape, out.stride(), range(out.ndim), strict=True), key=lambda d: d[1]):
        if size > 1 and stride < span:
            expected = f"be at least {span}" if stride else "not be 0"
            raise ArgumentError(
                f"{op}: out.stride({dim}) must {expected} for an output (its elements would share memory), got {stride}"
            )
        span += (size - 1) * stride
    begin = out.data_ptr()
    for name, x in inputs.items():
        if x is None or not x.numel() or begin >= _end(x) or x.data_ptr() >= _end(out) or _are_columns(out, x):
            continue
        raise ArgumentError(
            f"{op}: out must not share memory with {name} (it is written while {name} is read), "
            f"got addresses from {begin} on"
        )


def _strides(x: torch.Tensor) -> list[tuple[int, int]]:
    """Return size and stride in bytes of each dimension that has more than one element."""
    return [(n, stride * x.itemsize) for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]


def _end(x: torch.Tensor) -> int:
    return x.data_ptr() + x.itemsize + sum((n - 1) * stride for n, stride in _strides(x))


def _are_columns(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True for views of different columns of one buffer: no block of one reaches the next of the other."""
    dims_a, dims_b = _strides(a), _strides(b)
    for step in {stride for _, stride in dims_a + dims_b if stride}:
        of_a, of_b = (
            x.itemsize + sum((n - 1) * stride for n, stride in dims if stride % step)
            for x, dims in ((a, dims_a), (b, dims_b))
        )
        offset = (b.data_ptr() - a.data_ptr()) % step
        if of_a <= offset <= step - of_b:
            return True
    return False
