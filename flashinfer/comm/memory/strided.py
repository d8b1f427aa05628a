# SPDX-License-Identifier: Apache-2.0
"""Tensors over addresses that another owner keeps: rows at a stride, of several ranks and so of several devices.

They are made through DLPack, which names the device: torch's other doors ask the driver where an address is, and would
copy rows of a range that begins on another GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any, Union

import torch

from ..._runtime.errors import ArgumentError

__all__ = ["pack_strided_memory", "strided_rows"]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


#: Descriptions that torch reads again when a tensor dies, and what keeps their memory: some hundred bytes each.
_kept: list[Any] = []


def strided_rows(
    ptr: int, row_bytes: int, stride: int, rows: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return ``(rows, row_bytes // itemsize)`` over memory that must outlive the tensor; ``stride`` in bytes."""
    if stride % dtype.itemsize:
        raise ArgumentError(f"pack_strided_memory: segment_stride must be a multiple of {dtype}, got {stride} bytes")
    shape = (ctypes.c_int64 * 2)(rows, row_bytes)
    strides = (ctypes.c_int64 * 2)(stride, 1)
    kind, index = (2, device.index or 0) if device.type == "cuda" else (1, 0)
    managed = _Managed(_Tensor(ptr, kind, index, 2, 1, 8, 1, shape, strides, 0), None, None)
    _kept.append((managed, shape, strides))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    found = torch.utils.dlpack.from_dlpack(new(ctypes.byref(managed), b"dltensor", None))
    return found if dtype is torch.uint8 else found.view(dtype)


def pack_strided_memory(
    ptr: int,
    segment_size: int,
    segment_stride: int,
    num_segments: int,
    dtype: torch.dtype,
    dev_id: Union[int, torch.device],
) -> torch.Tensor:
    """Return segments of device memory as the rows of a tensor, which owns nothing."""
    device = dev_id if isinstance(dev_id, torch.device) else torch.device("cuda", dev_id)
    return strided_rows(ptr, segment_size, segment_stride, num_segments, dtype, device)
