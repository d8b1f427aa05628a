# SPDX-License-Identifier: Apache-2.0
"""Pair of tensors in which engines hold an NVFP4 result. Kernels that write it need Blackwell."""

from __future__ import annotations

from typing import Optional, Sequence

import torch

from .._runtime.errors import ArgumentError

__all__ = ["FP4Tensor"]


class FP4Tensor:
    """Packed e2m1 numbers with their block scales.

    Parameters
    ----------
    data : torch.Tensor
        uint8, two numbers in each element.
    scale : torch.Tensor
        float8_e4m3fn block scales.
    scale_start_index : int
        Row of ``scale`` that belongs to the first row of ``data``.
    original_shape : Optional[Sequence[int]]
        Shape of the numbers; default: that of ``data`` with the last dimension doubled.
    """

    def __init__(
        self,
        data: torch.Tensor,
        scale: torch.Tensor,
        scale_start_index: int = 0,
        original_shape: Optional[Sequence[int]] = None,
    ) -> None:
        if data.dtype is not torch.uint8 or data.ndim == 0:
            raise ArgumentError(f"FP4Tensor: data must be rows of uint8, got {data.ndim}-dimensional {data.dtype}")
        if scale.dtype is not torch.float8_e4m3fn:
            raise ArgumentError(f"FP4Tensor: scale must have dtype torch.float8_e4m3fn, got {scale.dtype}")
        unpacked = (*data.shape[:-1], data.shape[-1] * 2)
        if original_shape is not None and tuple(original_shape) != unpacked:
            raise ArgumentError(
                f"FP4Tensor: original_shape must be {unpacked} (two numbers a byte), got {tuple(original_shape)}"
            )
        self.data = data
        self.scale = scale
        self.scale_start_index = scale_start_index
        self.original_shape = torch.Size(unpacked)
        self.dtype = "nvfp4"
