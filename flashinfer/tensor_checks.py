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
    """Whether the elements are one of the two 8-bit floats kernels take, e4m3 or e5m2."""
    return x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def get_native_fp4_dtype() -> torch.dtype:
    """Of two e2m1 numbers in a byte."""
    return torch.float4_e2m1fn_x2


def canonicalize_torch_dtype(dtype: Union[torch.dtype, str]) -> torch.dtype:
    """``"float16"`` or ``torch.float16`` as a ``torch.dtype``."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}, expected a torch.dtype or the name of one")
    return found


def as_int32(op: str, **indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Index tensors as kernels read them: the very tensors when they are int32 already, copies of other integers."""
    try:
        return tuple([x if x.dtype is torch.int32 else narrowed(x, f"{op}: {name}") for name, x in indices.items()])
    except AttributeError:
        check_tensors(op, **indices)
        raise


def check_tensors(op: str, **arguments: object) -> None:
    """Raise ``TypeError`` for the first that is no tensor. For calls that failed: to ask beforehand takes time."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{op}: {name} is a {type(value).__name__}, expected a tensor")


def check_integers(x: torch.Tensor, name: str) -> None:
    dtype = x.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise ArgumentError(f"{name} has dtype {dtype}, expected integers, best torch.int32")


def narrowed(x: torch.Tensor, name: str) -> torch.Tensor:
    """int32 of integers; the very tensor if it is that. Others in host memory are looked at: what does not fit would
    become another number."""
    check_integers(x, name)
    if x.dtype is torch.int64 and not x.is_cuda and x.numel():
        low, high = x.aminmax()
        limits = torch.iinfo(torch.int32)
        if low < limits.min or high > limits.max:
            bad = int(low) if low < limits.min else int(high)
            raise ArgumentError(f"{name} contains {bad}, expected numbers of 32 bits")
    return x.to(torch.int32)


def check_shape_dtype_device(
    x: torch.Tensor,
    expected_shape: Optional[Sequence[int]],
    expected_dtype: Optional[torch.dtype],
    expected_device: Optional[torch.device],
    name: str,
) -> None:
    """Raise ``ArgumentError``, calling ``x`` by ``name``, when it is not as expected; None accepts anything."""
    if expected_shape is not None and tuple(x.shape) != tuple(expected_shape):
        raise ArgumentError(f"{name}: shape is {tuple(x.shape)}, expected {tuple(expected_shape)}")
    if expected_dtype is not None and x.dtype != expected_dtype:
        raise ArgumentError(f"{name}: dtype is {x.dtype}, expected {expected_dtype}")
    if expected_device is not None and x.device != expected_device:
        raise ArgumentError(f"{name}: device is {x.device}, expected {expected_device}")
