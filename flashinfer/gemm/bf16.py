# SPDX-License-Identifier: Apache-2.0
"""Products of bf16 matrices, dense and batched: facts of a call, the launch that was kept for them, or the checks."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import torch

from .._runtime.allocation import allocate
from .._runtime.arch import AMPERE_ON, capability_of
from .._runtime.codegen_wrapper import compiler, is_traced
from .._runtime.kept import KeptLaunches
from .._runtime.requirements import backend_requirement
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.gemm import bmm_bf16_trace, mm_bf16_trace
from .bf16_checks import (
    candidates,
    check_bmm_bf16,
    check_mm_bf16,
    first,
    serves_cublaslt,
    serves_cutile,
    serves_tinygemm,
)
from .checks import refuse_shared_memory, serves_all
from .decide import MANY_ROWS, depends_on_layout, prefers_torch_bf16
from .launch import noting, ordinary_product, product
from .torch_product import torch_bf16, torch_product
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
def _bmm_bf16(out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, with_torch: Optional[bool]) -> None:
    if A.is_cuda and with_torch is None:
        with_torch = prefers_torch_bf16(A, B, is_plain=out.dtype is A.dtype)
    if A.is_cuda and with_torch:
        torch_bf16(out, A, B)
    else:
        product(out, A, B.mT)


_SERVED = frozenset(AMPERE_ON)
_HOPPER = 90
_WITH_TORCH = {"cublaslt": True, "tinygemm": False}

Launch = Callable[..., Any]
Shape = Sequence[int]


def _launch_own(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Optional[torch.Tensor],
    out: Optional[torch.Tensor],
    out_dtype: torch.dtype,
    a_shape: Shape,
    b_shape: Shape,
    index: int,
) -> Optional[torch.Tensor]:
    if out is None:
        (m, _), n = a_shape, b_shape[1]
        out = allocate((m, n), (n or 1, 1), out_dtype, index)
    elif out.dtype is not out_dtype or len(a_shape) != 2:
        return None
    return out if ordinary_product["bf16"](out, a, b, None, None, bias, None, 0, 0) else None


def _launch_torch(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Optional[torch.Tensor],
    out: Optional[torch.Tensor],
    out_dtype: torch.dtype,
    a_shape: Shape,
    b_shape: Shape,
    index: int,
) -> Optional[torch.Tensor]:
    return torch_product(torch.mm, a, b, out, out_dtype, (a_shape[0], b_shape[1]))


def _launch_of(
    with_torch: bool, is_plain: bool, own: Launch, with_mm: Launch, a: torch.Tensor, b: torch.Tensor
) -> Optional[Launch]:
    """Return the launch for a choice: torch from Ampere on, our kernel on Hopper for the weights that it reads.

    Facts have no strides, which take 0.2 us: where they decide, torch is chosen anew in each call.
    """
    capability = capability_of[a.get_device()]
    if with_torch:
        return with_mm if capability in _SERVED and not depends_on_layout(a, b, is_plain=is_plain) else None
    return own if capability == _HOPPER and b.stride(-2) == 1 else None


_mm_launches = KeptLaunches(
    "m if (m := (a_shape := a.shape)[0]) < MANY_ROWS else MANY_ROWS, (b_shape := b.shape), out_dtype, "
    "bias is None, pdl, (index := a.get_device()), "
    "backend if backend != 'auto' else (a_shape, a.is_contiguous(), b.stride(), out is None or out.is_contiguous())",
    passed="a, b, bias, out, out_dtype, a_shape, b_shape, index",
    MANY_ROWS=MANY_ROWS,
)


@flashinfer_api(trace=mm_bf16_trace)
@_mm_launches
@backend_requirement(
    {"cudnn": serves_all, "cublaslt": serves_cublaslt, "tinygemm": serves_tinygemm, "cutile": serves_cutile},
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
    made = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device) if out is None else out
    with_torch = _WITH_TORCH.get(backend)
    if is_traced() or compiler._is_compiling_flag:
        mm_bf16_op(made, a, b, bias, pdl, with_torch, False)
        return made
    if out is not None and a.is_cuda:  # torch, which may multiply, does not look
        refuse_shared_memory("mm_bf16", out, a=a, b=b, bias=bias)
    if backend == "auto":
        launch = tuned_mm_bf16(made, a, b, bias, pdl, mm_bf16.suitable_auto_backends)
        _mm_launches.keep(launch, "auto", a, b, bias, pdl, out, out_dtype, backend)
        return made
    is_plain = bias is None and made.dtype is a.dtype
    is_kept = backend != "tinygemm"  # facts do not tell what it refuses
    if with_torch is None and capability_of[a.get_device()]:
        with_torch = prefers_torch_bf16(a, b, is_plain=is_plain)
        is_kept = not with_torch or is_plain  # torch takes several kernels for the others
    mm_bf16_op(made, a, b, bias, pdl, with_torch, False)
    launch = _launch_of(bool(with_torch), is_plain, _launch_own, _launch_torch, a, b) if is_kept else None
    _mm_launches.keep(launch, f"{with_torch=}", a, b, bias, pdl, out, out_dtype, backend)
    return made


def _launch_own_batch(
    A: torch.Tensor, B: torch.Tensor, out: Optional[torch.Tensor], out_dtype: torch.dtype, a: Shape, b: Shape, i: int
) -> Optional[torch.Tensor]:
    if out is None:
        (batch, m, _), n = a, b[2]
        out = allocate((batch, m, n), ((m or 1) * (n or 1), n or 1, 1), out_dtype, i)
    elif out.dtype is not out_dtype or len(a) != 3:
        return None
    return out if ordinary_product["bf16"](out, A, B, None, None, None, None, 0, 0) else None


def _launch_torch_batch(
    A: torch.Tensor, B: torch.Tensor, out: Optional[torch.Tensor], out_dtype: torch.dtype, a: Shape, b: Shape, i: int
) -> Optional[torch.Tensor]:
    return torch_product(torch.bmm, A, B, out, out_dtype, (a[0], a[1], b[2]))


_bmm_launches = KeptLaunches(
    "m if (m := (a_shape := A.shape)[1]) < MANY_ROWS else MANY_ROWS, (b_shape := B.shape), out_dtype, backend, "
    "(index := A.get_device())",
    passed="A, B, out, out_dtype, a_shape, b_shape, index",
    MANY_ROWS=MANY_ROWS,
)


@flashinfer_api(trace=bmm_bf16_trace)
@_bmm_launches
@backend_requirement({"cudnn": serves_all, "cutile": serves_all}, common_check=check_bmm_bf16, heuristic_func=first)
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
    made = torch.empty((*A.shape[:2], B.shape[2]), dtype=out_dtype, device=A.device) if out is None else out
    if is_traced() or compiler._is_compiling_flag:
        _bmm_bf16(made, A, B, None)
        return made
    if out is not None and A.is_cuda:
        refuse_shared_memory("bmm_bf16", out, A=A, B=B)
    with_torch, is_plain = None, made.dtype is A.dtype
    if capability_of[A.get_device()]:
        with_torch = prefers_torch_bf16(A, B, is_plain=is_plain)
    _bmm_bf16(made, A, B, with_torch)
    launch = _launch_of(bool(with_torch), is_plain, _launch_own_batch, _launch_torch_batch, A, B)
    if backend == "auto":  # the same choice
        launch = noting(launch, bmm_bf16.suitable_auto_backends)
    _bmm_launches.keep(launch, f"{with_torch=}", A, B, out, out_dtype, backend)
    return made
