# SPDX-License-Identifier: Apache-2.0
"""Products of bf16 matrices, dense and batched."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.codegen_wrapper import compiler, is_traced
from .._runtime.requirements import backend_requirement
from .._runtime.shortcut import with_shortcut
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.gemm import bmm_bf16_trace, mm_bf16_trace
from . import shortcuts
from .bf16_checks import (
    candidates,
    check_bmm_bf16,
    check_mm_bf16,
    first,
    serves_batch,
    serves_cublaslt,
    serves_cudnn,
    serves_cutile,
    serves_tinygemm,
)
from .decide import prefers_torch_bf16
from .launch import product
from .torch_product import torch_bf16
from .tuning import tuned_mm_bf16

__all__ = ["bmm_bf16", "mm_bf16", "mm_bf16_op"]


@register_custom_op("flashinfer::mm_bf16", mutates_args=("out",))
def mm_bf16_op(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Optional[torch.Tensor],
    pdl: bool,
    with_torch: Optional[bool],
    is_tiny: bool,
) -> None:
    """Multiply with torch, with our kernel, or (``with_torch`` is None) by the rule.

    ``is_tiny`` asks for our kernel wherever it takes few rows, however few the weights.
    """
    if a.is_cuda and with_torch is None:
        is_plain = bias is None and out.dtype is a.dtype and not is_tiny
        with_torch = prefers_torch_bf16(a, b, is_plain=is_plain)
    if a.is_cuda and with_torch:
        torch_bf16(out, a, b, bias)
    else:
        product(out, a, b.mT, bias=bias, enable_pdl=pdl or None)


@register_custom_op("flashinfer::bmm_bf16", mutates_args=("out",))
def _bmm_bf16(out: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> None:
    if A.is_cuda and prefers_torch_bf16(A, B, is_plain=out.dtype is A.dtype):
        torch_bf16(out, A, B)
    else:
        product(out, A, B.mT)


@flashinfer_api(trace=mm_bf16_trace)
@with_shortcut(shortcuts.mm_bf16)
@backend_requirement(
    {"cudnn": serves_cudnn, "cublaslt": serves_cublaslt, "tinygemm": serves_tinygemm, "cutile": serves_cutile},
    common_check=check_mm_bf16,
    heuristic_func=candidates,
)
def mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    pdl: bool = False,
    out: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "cudnn",
) -> torch.Tensor:
    r"""Product of bf16 matrices, ``a @ b + bias``: sums and bias in float32, rounded once.

    Parameters
    ----------
    a : torch.Tensor
        ``(m, k)`` bfloat16.
    b : torch.Tensor
        ``(k, n)`` bfloat16. Column-major (the transposed view of ``(n, k)`` weights) is the fast layout; any strides
        are taken.
    bias : Optional[torch.Tensor]
        ``(n,)`` bfloat16.
    pdl : bool
        Programmatic dependent launch: a hint without effect on the result.
    out : Optional[torch.Tensor]
        ``(m, n)`` of ``out_dtype``; written and returned when given.
    out_dtype : torch.dtype
        torch.bfloat16, torch.float16 or torch.float32.
    backend : str
        ``"cudnn"`` and ``"cutile"`` choose torch's cuBLASLt or our kernel by a rule (``gemm/decide.py``);
        ``"cublaslt"`` is torch, ``"tinygemm"`` is our kernel; ``"auto"`` is the choice of the autotuner, by the same
        rule where nothing was tuned. Only cudnn and tinygemm take a bias.

    Returns
    -------
    torch.Tensor
        ``(m, n)``.

    Examples
    --------
    >>> x, w = torch.randn(4, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    >>> y = flashinfer.mm_bf16(x, w.T)
    """
    if out is None:
        out = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    if backend == "auto" and not (is_traced() or compiler._is_compiling_flag):
        tuned_mm_bf16(out, a, b, bias, pdl, mm_bf16.suitable_auto_backends.current())
    else:
        mm_bf16_op(out, a, b, bias, pdl, _WITH_TORCH.get(backend), False)
    return out


_WITH_TORCH = {"cublaslt": True, "tinygemm": False}


@flashinfer_api(trace=bmm_bf16_trace)
@with_shortcut(shortcuts.bmm_bf16)
@backend_requirement({"cudnn": serves_batch, "cutile": serves_batch}, common_check=check_bmm_bf16, heuristic_func=first)
def bmm_bf16(
    A: torch.Tensor,
    B: torch.Tensor,
    out: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "cudnn",
) -> torch.Tensor:
    r"""Batched product of bf16 matrices, ``A @ B``: sums in float32, rounded once.

    Parameters
    ----------
    A : torch.Tensor
        ``(batch, m, k)`` bfloat16.
    B : torch.Tensor
        ``(batch, k, n)`` bfloat16. Column-major (the transposed view of ``(batch, n, k)``) is the fast layout; any
        strides are taken.
    out : Optional[torch.Tensor]
        ``(batch, m, n)`` of ``out_dtype``; written and returned when given.
    out_dtype : torch.dtype
        torch.bfloat16, torch.float16 or torch.float32.
    backend : str
        ``"cudnn"``, ``"cutile"`` or ``"auto"``: all choose torch's cuBLASLt or our kernel by a rule
        (``gemm/decide.py``).

    Returns
    -------
    torch.Tensor
        ``(batch, m, n)``.

    Examples
    --------
    >>> x, w = torch.randn(2, 4, 64).bfloat16(), torch.randn(2, 32, 64).bfloat16()
    >>> y = flashinfer.bmm_bf16(x, w.mT)
    """
    if out is None:
        x = A.shape
        out = torch.empty((x[0], x[1], B.shape[2]), dtype=out_dtype, device=A.device)
    _bmm_bf16(out, A, B)
    return out
