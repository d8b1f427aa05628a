# SPDX-License-Identifier: Apache-2.0
"""Checks and conversions of a tensor's shape, dtype and device."""

from __future__ import annotations

from typing import Optional, Sequence, Union

import torch

from .errors import ArgumentError

__all__ = [
    "as_int32",
    "canonicalize_torch_dtype",
    "check_integers",
    "check_shape_dtype_device",
    "check_tensors",
    "get_native_fp4_dtype",
    "is_float8",
    "narrowed",
]


def is_float8(x: torch.Tensor) -> bool:
    """Return True if the elements are one of the two 8-bit floats kernels take, e4m3 or e5m2."""
    return x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def get_native_fp4_dtype() -> torch.dtype:
    """Return the dtype of two e2m1 numbers packed in a byte."""
    return torch.float4_e2m1fn_x2


def canonicalize_torch_dtype(dtype: Union[torch.dtype, str]) -> torch.dtype:
    """Convert ``"float16"`` or ``torch.float16`` to a ``torch.dtype``."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or the name of one, got {dtype!r}")
    return found


def as_int32(op: str, **indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast index tensors to int32, which kernels read; tensors that are int32 already are returned as they are."""
    try:
        return tuple([x if x.dtype is torch.int32 else narrowed(x, f"{op}: {name}") for name, x in indices.items()])
    except AttributeError:
        check_tensors(op, **indices)
        raise


def check_tensors(op: str, **arguments: object) -> None:
    """Raise ``TypeError`` for the first argument that is no tensor. Called after a failure: checking costs time."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got a {type(value).__name__}")


def check_integers(x: torch.Tensor, name: str) -> None:
    dtype = x.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise ArgumentError(f"{name} must have an integer dtype (best torch.int32), got {dtype}")


def narrowed(x: torch.Tensor, name: str) -> torch.Tensor:
    """Cast integers to int32, without a copy if possible. CPU int64 values are range-checked: a cast would wrap."""
    check_integers(x, name)
    if x.dtype is torch.int64 and not x.is_cuda and x.numel():
        low, high = x.aminmax()
        limits = torch.iinfo(torch.int32)
        if low < limits.min or high > limits.max:
            bad = int(low) if low < limits.min else int(high)
            raise ArgumentError(f"{name} must contain numbers of 32 bits, got {bad}")
    return x.to(torch.int32)


def check_shape_dtype_device(
    x: torch.Tensor,
    expected_shape: Optional[Sequence[int]],
    expected_dtype: Optional[torch.dtype],
    expected_device: Optional[torch.device],
    name: str,
) -> None:
    """Raise ``ArgumentError``, naming ``x`` as ``name``, if ``x`` is not as expected; None accepts anything."""
    if expected_shape is not None and tuple(x.shape) != tuple(expected_shape):
        raise ArgumentError(f"{name}: shape must be {tuple(expected_shape)}, got {tuple(x.shape)}")
    if expected_dtype is not None and x.dtype != expected_dtype:
        raise ArgumentError(f"{name}: dtype must be {expected_dtype}, got {x.dtype}")
    if expected_device is not None and x.device != expected_device:
        raise ArgumentError(f"{name}: device must be {expected_device}, got {x.device}")


LSE_BASES = ("log2", "ln")  #: logarithms of the sums of exponentials that published calls name
LSE_LAYOUTS = ("NH", "HN")  #: tokens by heads, or heads by tokens


def check_lse_base(lse_base: str) -> None:
    if lse_base not in LSE_BASES:
        raise ArgumentError(f"lse_base must be one of {', '.join(LSE_BASES)}, got {lse_base!r}")


def check_lse_layout(lse_layout: str) -> None:
    if lse_layout not in LSE_LAYOUTS:
        raise ArgumentError(f"lse_layout must be one of {', '.join(LSE_LAYOUTS)}, got {lse_layout!r}")
