# SPDX-License-Identifier: Apache-2.0
"""Checks of the bf16 products: those of every backend, those of one, and the order of the backends for "auto"."""

from __future__ import annotations

import importlib.util
from typing import Any, Optional, Sequence

import torch

from .._runtime.arch import AMPERE_ON, CPU
from .._runtime.errors import ArgumentError
from .._runtime.requirements import supported_compute_capability
from .checks import refuse_output, refuse_shapes

__all__ = [
    "CUDNN_AVAILABLE",
    "candidates",
    "check_bmm_bf16",
    "check_mm_bf16",
    "first",
    "serves_cublaslt",
    "serves_cutile",
    "serves_tinygemm",
    "tiny_is_served",
]

_BF16 = torch.bfloat16
_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


#: True if the package of cuDNN's frontend is installed. It is not imported, and nothing here needs it.
CUDNN_AVAILABLE = importlib.util.find_spec("cudnn") is not None


def _check_product(
    op: str,
    names: tuple[str, str],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Optional[torch.Tensor],
    out: Optional[torch.Tensor],
    out_dtype: torch.dtype,
) -> bool:
    """Test everything at once; find the words for an error afterwards. Rank 3 where the names are capitals."""
    rank = 2 if names[0] == "a" else 3
    x, y = a.shape, b.shape
    if (
        a.dtype is _BF16
        and b.dtype is _BF16
        and len(x) == rank == len(y)
        and x[-1] == y[-2]
        and x[0] == (x[0] if rank == 2 else y[0])
        and out_dtype in _OUTPUTS
        and (bias is None or (bias.dtype is _BF16 and bias.shape == y[-1:]))
        and (out is None or (out.dtype is out_dtype and out.shape == (*x[:-1], y[-1]) and out.device == a.device))
    ):
        return True
    for name, operand in zip(names, (a, b), strict=True):
        if operand.dtype != _BF16:
            raise ArgumentError(f"{op}: unsupported dtype: {name} must be bfloat16, got {operand.dtype}")
    refuse_shapes(op, names, a, b, rank)
    if bias is not None and bias.dtype != _BF16:
        raise ArgumentError(f"{op}: unsupported dtype: bias must be bfloat16, got {bias.dtype}")
    if bias is not None and bias.shape != y[-1:]:
        raise ArgumentError(f"{op}: bias must be ({y[-1]},), got {tuple(bias.shape)}")
    refuse_output(op, out, (*x[:-1], y[-1]), a.device, out_dtype, _OUTPUTS)
    return True


@supported_compute_capability([CPU, *AMPERE_ON])
def check_mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    pdl: bool = False,
    out: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "cudnn",
) -> bool:
    return _check_product("mm_bf16", ("a", "b"), a, b, bias, out, out_dtype)


def serves_cublaslt(a: Any, b: Any, bias: Optional[torch.Tensor] = None, pdl: bool = False, *_: Any) -> bool:
    if bias is not None:
        raise ArgumentError("mm_bf16: backend 'cublaslt' does not support bias: bias must be None, got a tensor")
    if pdl:
        raise ArgumentError(f"mm_bf16: backend 'cublaslt' does not support pdl: pdl must be False, got {pdl}")
    return True


def serves_cutile(a: Any, b: Any, bias: Optional[torch.Tensor] = None, pdl: bool = False, *_: Any) -> bool:
    if bias is not None:
        raise ArgumentError("mm_bf16: backend 'cutile' ignores `bias`: bias must be None, got a tensor")
    if pdl:
        raise ArgumentError(f"mm_bf16: backend 'cutile' ignores `pdl`: pdl must be False, got {pdl}")
    return True


def tiny_is_served(
    op: str, names: Sequence[str], a: torch.Tensor, weight: torch.Tensor, *others: Optional[torch.Tensor]
) -> bool:
    """Check what the published kernel for few rows asks of ``(m, k)``, ``(n, k)``, bias and output."""
    for name, x in zip(names, (a, weight, *others), strict=True):
        if x is not None and not x.is_contiguous():
            raise ArgumentError(f"{op}: {name} must be contiguous, got strides {tuple(x.stride())}")
    if weight.shape[0] % 16 != 0:
        raise ArgumentError(f"{op}: {names[1]} must have a multiple of 16 output features, got {weight.shape[0]}")
    return True


def serves_tinygemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    pdl: bool = False,
    out: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "tinygemm",
) -> bool:
    if out_dtype is not _BF16:
        raise ArgumentError(f"mm_bf16: backend 'tinygemm' requires bfloat16: out_dtype must be it, got {out_dtype}")
    return tiny_is_served("mm_bf16: backend 'tinygemm'", ("a", "b.T", "bias", "out"), a, b.mT, bias, out)


def candidates(suitable: Sequence[str], *args: Any, **kwargs: Any) -> Sequence[str]:
    """Order the names for "auto" as published: cuDNN where its package is, cuBLASLt, the kernel for few rows."""
    names = [name for name in suitable if name != "cutile" and (name != "cudnn" or CUDNN_AVAILABLE)]
    return names or ["cudnn"]


@supported_compute_capability([CPU, *AMPERE_ON])
def check_bmm_bf16(
    A: torch.Tensor,
    B: torch.Tensor,
    out: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "cudnn",
) -> bool:
    return _check_product("bmm_bf16", ("A", "B"), A, B, None, out, out_dtype)


def first(suitable: Sequence[str], *args: Any, **kwargs: Any) -> Sequence[str]:
    return suitable[:1]
