# SPDX-License-Identifier: Apache-2.0
"""Ordinary calls of the products on CUDA, straight to the kernel or to torch (:mod:`flashinfer._runtime.shortcut`).

Native code takes the tensors as callers pass them: a view such as ``b.mT`` takes 1 us. It compares shapes, dtypes and
devices; each shortcut tests what native code or torch would take and the public function refuses. Which product runs is
the rule of ``decide.py``, whose line for few rows is here too, because a call takes 0.1 us; or with ``backend="auto"``
what the tuner has chosen (``auto_shortcuts.py``).
"""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.allocation import allocate
from .._runtime.requirements import SuitableBackends
from .._runtime.shortcut import capability_of
from .auto_shortcuts import auto_bmm_fp8, auto_mm_bf16
from .decide import FEW_ROWS, LARGE_BF16, LARGE_FP8, SMALL_BF16, SMALL_FP8, are_streamed_faster
from .launch import CONTIGUOUS, MASKED, PACKED, Sm90Functions, dense_product
from .torch_product import torch_product, torch_scaled_mm

__all__ = [
    "batch_deepgemm",
    "bmm_bf16",
    "bmm_fp8",
    "fp8_blockscale",
    "group_deepgemm",
    "grouped_mm_bf16",
    "mm_bf16",
]

_grouped = Sm90Functions("gemm_sm90_grouped")
_blockscale = Sm90Functions("gemm_sm90_blockscale")

_BF16, _F16 = torch.bfloat16, torch.float16
_BLOCKS = (1, 128, 128)
_CUDNN = ("cudnn",)  # what suits backend="auto"

OptionalTensor = Optional[torch.Tensor]


def mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: OptionalTensor,
    pdl: bool,
    out: OptionalTensor,
    out_dtype: torch.dtype,
    backend: str,
    suitable_auto_backends: SuitableBackends,
) -> OptionalTensor:
    if backend != "cudnn" and (bias is not None or pdl or (backend != "cutile" and backend != "cublaslt")):
        if backend == "auto":
            return auto_mm_bf16(a, b, bias, pdl, out, out_dtype, suitable_auto_backends)
        return None
    index = a.get_device()
    capability = capability_of[index]
    (m, k), n = a.shape, b.shape[1]
    if m <= FEW_ROWS:
        is_own = n * k >= SMALL_BF16 or bias is not None or out_dtype is not _BF16
    else:
        is_own = are_streamed_faster(m, n, k, 1, SMALL_BF16, LARGE_BF16)
    if is_own and capability == 90 and b.stride()[0] == 1 and backend != "cublaslt":
        if out is None:
            out = allocate((m, n), (n or 1, 1), out_dtype, index)
        elif out.dtype is not out_dtype:
            return None
        return out if dense_product["bf16"](out, a, b, None, None, bias, True) else None
    return torch_product(torch.mm, a, b, out, out_dtype, (m, n), capability) if bias is None else None


def bmm_bf16(
    A: torch.Tensor,
    B: torch.Tensor,
    out: OptionalTensor,
    out_dtype: torch.dtype,
    backend: str,
    suitable_auto_backends: SuitableBackends,
) -> OptionalTensor:
    if backend == "auto":  # the same rule
        out = bmm_bf16(A, B, out, out_dtype, "cudnn", suitable_auto_backends)
        if out is not None:
            suitable_auto_backends.note(_CUDNN)
        return out
    if backend != "cudnn" and backend != "cutile":
        return None
    index = A.get_device()
    capability = capability_of[index]
    (batch, m, k), n = A.shape, B.shape[2]
    if m <= FEW_ROWS:
        is_own = batch * n * k >= SMALL_BF16 or out_dtype is not _BF16
    else:
        is_own = are_streamed_faster(m, n, k, batch, SMALL_BF16, LARGE_BF16)
    if is_own and capability == 90 and B.stride()[1] == 1:
        if out is None:
            out = allocate((batch, m, n), ((m or 1) * (n or 1), n or 1, 1), out_dtype, index)
        elif out.dtype is not out_dtype:
            return None
        return out if dense_product["bf16"](out, A, B, None, None, None, True) else None
    return torch_product(torch.bmm, A, B, out, out_dtype, (batch, m, n), capability)


def bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: OptionalTensor,
    backend: str,
    suitable_auto_backends: SuitableBackends,
) -> OptionalTensor:
    if dtype is not _BF16 and dtype is not _F16:
        return None
    if backend != "cublas" and backend != "cudnn":
        if backend == "auto":
            return auto_bmm_fp8(A, B, A_scale, B_scale, dtype, out, suitable_auto_backends)
        return None
    if out is not None and out.dtype is not dtype:
        return None
    index = A.get_device()
    capability = capability_of[index]
    a_shape, b_shape = A.shape, B.shape
    (batch, m, k), n = a_shape, b_shape[2]
    if batch > 1:
        is_own = True
    elif m <= FEW_ROWS:
        is_own = n * k >= SMALL_FP8
    else:
        is_own = are_streamed_faster(m, n, k, 1, SMALL_FP8, LARGE_FP8)
    if is_own:
        if capability != 90:
            return None
        if out is None:
            out = allocate((batch, m, n), ((m or 1) * (n or 1), n or 1, 1), dtype, index)
        return out if dense_product["fp8"](out, A, B, A_scale, B_scale, None, True) else None
    return torch_scaled_mm(A, B, A_scale, B_scale, dtype, out, a_shape, b_shape, capability)


def fp8_blockscale(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: OptionalTensor,
    weight_scale: OptionalTensor,
    out: OptionalTensor,
    out_dtype: Optional[torch.dtype],
) -> OptionalTensor:
    index = input.get_device()
    if capability_of[index] != 90 or weight_scale is None:
        return None
    if out is None:
        m, n = input.shape[0], weight.shape[0]
        out = allocate((m, n), (n or 1, 1), _BF16 if out_dtype is None else out_dtype, index)
    elif out_dtype is not None and out.dtype is not out_dtype:
        return None
    return out if _blockscale["fp8_block"](out, input, weight, input_scale, weight_scale, True) else None


def group_deepgemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    scale_granularity_mnk: tuple[int, int, int],
    out: OptionalTensor,
    out_dtype: Optional[torch.dtype],
) -> OptionalTensor:
    index = a.get_device()
    if (
        capability_of[index] != 90
        or scale_granularity_mnk != _BLOCKS
        or (out_dtype is not None and out_dtype is not _BF16)
    ):
        return None
    if out is None:
        m, n = a.shape[0], b.shape[1]
        out = allocate((m, n), (n or 1, 1), _BF16, index)
    elif out.dtype is not _BF16:
        return None
    return out if _grouped["fp8_block"](out, a, b, a_scale, b_scale, m_indices, CONTIGUOUS, 0, True) else None


def batch_deepgemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    scale_granularity_mnk: tuple[int, int, int],
    out: OptionalTensor,
    out_dtype: Optional[torch.dtype],
) -> OptionalTensor:
    index = a.get_device()
    if (
        capability_of[index] != 90
        or scale_granularity_mnk != _BLOCKS
        or expected_m < 1
        or (out_dtype is not None and out_dtype is not _BF16)
    ):
        return None
    if out is None:
        (groups, m, _), n = a.shape, b.shape[1]
        out = allocate((groups, m, n), ((m or 1) * (n or 1), n or 1, 1), _BF16, index)
    elif out.dtype is not _BF16:
        return None
    return out if _grouped["fp8_block"](out, a, b, a_scale, b_scale, masked_m, MASKED, expected_m, True) else None


def grouped_mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out: OptionalTensor,
    out_dtype: torch.dtype,
    backend: str,
    suitable_auto_backends: SuitableBackends,
) -> OptionalTensor:
    index = a.get_device()
    if capability_of[index] != 90 or (backend != "cudnn" and backend != "auto"):
        return None
    if out is None:
        m, n = a.shape[0], b.shape[1]
        out = allocate((m, n), (n or 1, 1), out_dtype, index)
    if not _grouped["bf16"](out, a, b, None, None, m_indptr, PACKED, 0, True):
        return None
    if backend == "auto":
        suitable_auto_backends.note(_CUDNN)
    return out
