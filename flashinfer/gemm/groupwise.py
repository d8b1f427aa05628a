# SPDX-License-Identifier: Apache-2.0
"""Products of fp8 matrices with one scale per block: dense, and with packed groups of rows."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.arch import AMPERE_ON, CPU
from .._runtime.errors import ArgumentError
from .._runtime.requirements import backend_requirement, supported_compute_capability
from ..api_logging import flashinfer_api
from ..trace.templates.gemm_groupwise import (
    gemm_fp8_nt_blockscaled_trace,
    gemm_fp8_nt_groupwise_trace,
    group_gemm_fp8_nt_groupwise_trace,
)
from .groupwise_checks import check_float8, check_granularity, check_major, check_out, check_scale
from .launch import BATCHED, PACKED, grouped_product

__all__ = [
    "gemm_fp8_nt_blockscaled",
    "gemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise",
    "pad_indptr_to_multiple_of_4",
]

Granularity = tuple[int, int, int]


def _check_matrices(op: str, a: torch.Tensor, b: torch.Tensor, rank_of_b: int) -> None:
    if a.ndim != 2 or b.ndim != rank_of_b:
        expected = "(n, k)" if rank_of_b == 2 else "(groups, n, k)"
        raise ArgumentError(
            f"{op}: Shape mismatch: a must have shape (m, k) and b {expected}, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}"
        )
    if a.shape[1] != b.shape[-1]:
        raise ArgumentError(f"{op}: Shape mismatch: a and b must have the same k, got {a.shape[1]} and {b.shape[-1]}")


@supported_compute_capability([CPU, *AMPERE_ON])
def _check_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: Optional[str] = None,
    mma_sm: int = 1,
    scale_granularity_mnk: Granularity = (1, 128, 128),
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    backend: str = "cutlass",
) -> bool:
    op = "gemm_fp8_nt_groupwise"
    check_float8(op, a=a, b=b)
    _check_matrices(op, a, b, 2)
    check_granularity(op, scale_granularity_mnk)
    if scale_major_mode is None and backend != "trtllm":
        raise ArgumentError(f"{op}: scale_major_mode is required with backend {backend!r} ('MN' or 'K'), got None")
    gm, gn, gk = scale_granularity_mnk
    if scale_major_mode is None:  # trtllm's own layout
        check_scale(op, "a_scale", a_scale, a, gm, gk, "K")
        check_scale(op, "b_scale", b_scale, b, gn, gk, "MN")
    else:
        check_major(op, scale_major_mode)
        check_scale(op, "a_scale", a_scale, a, gm, gk, scale_major_mode)
        check_scale(op, "b_scale", b_scale, b, gn, gk, scale_major_mode)
    check_out(op, a, (a.shape[0], b.shape[0]), out, out_dtype)
    return True


def _always(*_: object, **__: object) -> bool:
    return True


def _check_gemm_trtllm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: Optional[str] = None,
    mma_sm: int = 1,
    scale_granularity_mnk: Granularity = (1, 128, 128),
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    backend: str = "cutlass",
) -> bool:
    if tuple(scale_granularity_mnk) != (1, 128, 128):
        raise ArgumentError(
            "gemm_fp8_nt_groupwise: scale_granularity_mnk must be (1, 128, 128) with backend 'trtllm', got "
            f"{tuple(scale_granularity_mnk)}"
        )
    if a.shape[1] < 256:
        raise ArgumentError(f"gemm_fp8_nt_groupwise: k must be at least 256 with backend 'trtllm', got {a.shape[1]}")
    return True


@flashinfer_api(trace=gemm_fp8_nt_groupwise_trace)
@backend_requirement(
    backend_checks={"cutlass": _always, "trtllm": _check_gemm_trtllm},
    common_check=_check_gemm,
)
def gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: Optional[str] = None,
    mma_sm: int = 1,
    scale_granularity_mnk: Granularity = (1, 128, 128),
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    backend: str = "cutlass",
) -> torch.Tensor:
    r"""Product ``a @ b.T`` of fp8 matrices with one scale per block. Sums are fp32, rounded once.

    Parameters
    ----------
    a : torch.Tensor
        ``(m, k)`` float8_e4m3fn or float8_e5m2.
    b : torch.Tensor
        ``(n, k)`` float8_e4m3fn or float8_e5m2.
    a_scale : torch.Tensor
        float32 factors, any numbers: ``(m / gm, k / gk)`` in mode "K", ``(k / gk, m / gm)`` in mode "MN", where
        ``gm, gn, gk = scale_granularity_mnk``. Backend "trtllm" without a mode: ``(m, k / 128)``, of any strides.
    b_scale : torch.Tensor
        float32 factors: ``(n / gn, k / gk)`` in mode "K", ``(k / gk, n / gn)`` in mode "MN" and for "trtllm".
    scale_major_mode : Optional[str]
        "K" or "MN"; only "trtllm" may leave it out.
    mma_sm : int
        Accepted for compatibility and ignored.
    scale_granularity_mnk : tuple of int
        Rows of ``a``, rows of ``b`` and elements along k that share a scale. Sizes need not be multiples.
    out : Optional[torch.Tensor]
        ``(m, n)`` bfloat16 or float16, written and returned when given.
    out_dtype : Optional[torch.dtype]
        dtype of the result without ``out``; default bfloat16.
    backend : str
        "cutlass" or "trtllm": they name layouts of scales, the kernel is the same.

    Returns
    -------
    torch.Tensor
        ``(m, n)``.

    Examples
    --------
    >>> a, b = torch.ones(4, 256).to(torch.float8_e4m3fn), torch.ones(128, 256).to(torch.float8_e4m3fn)
    >>> y = flashinfer.gemm.gemm_fp8_nt_groupwise(a, b, torch.ones(4, 2), torch.ones(1, 2), "K")
    >>> y[0, 0].item()
    256.0
    """
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype or torch.bfloat16)
    if scale_major_mode == "MN":
        a_scale = a_scale.mT
    if scale_major_mode != "K":
        b_scale = b_scale.mT
    grouped_product(out, a, b, a_scale, b_scale, None, BATCHED, *scale_granularity_mnk)
    return out


@supported_compute_capability([CPU, *AMPERE_ON])
def _check_blockscaled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: str = "MN",
    mma_sm: int = 1,
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> bool:
    op = "gemm_fp8_nt_blockscaled"
    check_float8(op, a=a, b=b)
    _check_matrices(op, a, b, 2)
    check_major(op, scale_major_mode)
    check_scale(op, "a_scale", a_scale, a, 128, 128, scale_major_mode)
    check_scale(op, "b_scale", b_scale, b, 128, 128, scale_major_mode)
    check_out(op, a, (a.shape[0], b.shape[0]), out, out_dtype)
    return True


@flashinfer_api(trace=gemm_fp8_nt_blockscaled_trace)
@backend_requirement(backend_checks={}, common_check=_check_blockscaled)
def gemm_fp8_nt_blockscaled(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    scale_major_mode: str = "MN",
    mma_sm: int = 1,
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    r"""Product ``a @ b.T`` of fp8 matrices with one scale per block of 128 x 128 in both.

    Parameters
    ----------
    a, b : torch.Tensor
        ``(m, k)`` and ``(n, k)``, float8_e4m3fn or float8_e5m2.
    a_scale, b_scale : torch.Tensor
        float32 factors: ``(m / 128, k / 128)`` and ``(n / 128, k / 128)`` in mode "K", transposed in mode "MN".
    scale_major_mode : str
        "MN" or "K".
    mma_sm : int
        Accepted for compatibility and ignored.
    out : Optional[torch.Tensor]
        ``(m, n)`` bfloat16 or float16, written and returned when given.
    out_dtype : Optional[torch.dtype]
        dtype of the result without ``out``; default bfloat16.

    Returns
    -------
    torch.Tensor
        ``(m, n)``.

    Examples
    --------
    >>> a, b = torch.ones(128, 256).to(torch.float8_e4m3fn), torch.ones(128, 256).to(torch.float8_e4m3fn)
    >>> y = flashinfer.gemm.gemm_fp8_nt_blockscaled(a, b, torch.ones(1, 2), torch.ones(1, 2), "K")
    >>> y[0, 0].item()
    256.0
    """
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype or torch.bfloat16)
    if scale_major_mode == "MN":
        a_scale, b_scale = a_scale.mT, b_scale.mT
    grouped_product(out, a, b, a_scale, b_scale, None, BATCHED, 128, 128, 128)
    return out


@supported_compute_capability([CPU, *AMPERE_ON])
def _check_group_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_granularity_mnk: Granularity = (1, 128, 128),
    scale_major_mode: str = "MN",
    mma_sm: int = 1,
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    backend: str = "trtllm",
    segment_alignment: int = 1,
) -> bool:
    op = "group_gemm_fp8_nt_groupwise"
    if segment_alignment < 1:
        raise ArgumentError(f"{op}: segment_alignment must be at least 1, got {segment_alignment}")
    check_float8(op, a=a, b=b)
    check_major(op, scale_major_mode)
    if mma_sm not in (1, 2):
        raise ArgumentError(f"{op}: mma_sm must be either 1 or 2, got {mma_sm}")
    check_granularity(op, scale_granularity_mnk)
    _check_matrices(op, a, b, 3)
    if m_indptr.dtype is not torch.int32:
        raise ArgumentError(f"{op}: m_indptr must be a int32 tensor, got {m_indptr.dtype}")
    groups, n, k = b.shape
    if m_indptr.shape != (groups + 1,):
        raise ArgumentError(
            f"{op}: Shape mismatch: m_indptr must have shape {(groups + 1,)}, got {tuple(m_indptr.shape)}"
        )
    if n % 8:
        raise ArgumentError(f"{op}: n must be a multiple of 8, got {n}")
    if k % 16:
        raise ArgumentError(f"{op}: k must be a multiple of 16, got {k}")
    gm, gn, gk = scale_granularity_mnk
    check_scale(op, "a_scale", a_scale, a, gm, gk, scale_major_mode)
    check_scale(op, "b_scale", b_scale, b, gn, gk, scale_major_mode)
    check_out(op, a, (a.shape[0], n), out, out_dtype)
    if out is not None and out_dtype is not None and out.dtype != out_dtype:
        raise ArgumentError(f"{op}: dtype mismatch: out must have out_dtype {out_dtype}, got {out.dtype}")
    return True


@flashinfer_api(trace=group_gemm_fp8_nt_groupwise_trace)
@backend_requirement(backend_checks={"trtllm": _always, "cutlass": _always}, common_check=_check_group_gemm)
def group_gemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    scale_granularity_mnk: Granularity = (1, 128, 128),
    scale_major_mode: str = "MN",
    mma_sm: int = 1,
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    backend: str = "trtllm",
    segment_alignment: int = 1,
) -> torch.Tensor:
    r"""Product of each group of rows with the fp8 matrix of its group: rows ``m_indptr[g] .. m_indptr[g + 1]`` of ``a``
    times ``b[g].T``, with one scale per block.

    Parameters
    ----------
    a : torch.Tensor
        ``(cum_m, k)`` float8_e4m3fn or float8_e5m2; k is a multiple of 16.
    b : torch.Tensor
        ``(groups, n, k)`` float8_e4m3fn or float8_e5m2; n is a multiple of 8.
    a_scale : torch.Tensor
        float32 factors: ``(k / gk, cum_m / gm)`` in mode "MN", ``(cum_m / gm, k / gk)`` in mode "K", where
        ``gm, gn, gk = scale_granularity_mnk``.
    b_scale : torch.Tensor
        float32 factors: ``(groups, k / gk, n / gn)`` in mode "MN", ``(groups, n / gn, k / gk)`` in mode "K".
    m_indptr : torch.Tensor
        ``(groups + 1,)`` int32 on the device of ``a``, not decreasing; groups may be empty. The host reads no values.
    scale_granularity_mnk : tuple of int
        Rows of ``a``, rows of ``b`` and elements along k that share a scale.
    scale_major_mode : str
        "MN" or "K".
    mma_sm : int
        1 or 2, without effect.
    out : Optional[torch.Tensor]
        ``(cum_m, n)`` bfloat16 or float16, written and returned when given; rows of no group are left as they are.
    out_dtype : Optional[torch.dtype]
        dtype of the result without ``out``; default bfloat16.
    backend : str
        "trtllm" or "cutlass", without effect on the result.
    segment_alignment : int
        What the boundaries of groups are multiples of, at least 1: a hint without effect on the result.

    Returns
    -------
    torch.Tensor
        ``(cum_m, n)``.

    Examples
    --------
    >>> a, b = torch.ones(6, 128).to(torch.float8_e4m3fn), torch.ones(2, 128, 128).to(torch.float8_e4m3fn)
    >>> a_scale, b_scale = torch.ones(6, 1), torch.tensor([1.0, 2.0]).view(2, 1, 1)
    >>> m_indptr = torch.tensor([0, 4, 6]).int()  # four rows of the first group, two of the second
    >>> y = flashinfer.gemm.group_gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, m_indptr, scale_major_mode="K")
    >>> y[:, 0].tolist()
    [128.0, 128.0, 128.0, 128.0, 256.0, 256.0]
    """
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype or torch.bfloat16)
    if scale_major_mode == "MN":
        a_scale, b_scale = a_scale.mT, b_scale.mT
    grouped_product(out, a, b, a_scale, b_scale, m_indptr, PACKED, *scale_granularity_mnk)
    return out


def pad_indptr_to_multiple_of_4(m_indptr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the lengths of groups up to multiples of four. Reads the number of rows on the host.

    Returns the boundaries of the longer groups, and where in them each row goes. Our products take groups of any
    length; kernels of others do not.
    """
    lengths = m_indptr.diff()
    padded = torch.zeros_like(m_indptr)
    padded[1:] = ((lengths + 3) // 4 * 4).cumsum(0)
    shift = (padded - m_indptr)[:-1].repeat_interleave(lengths)
    return padded, (torch.arange(len(shift), device=m_indptr.device) + shift).to(m_indptr.dtype)
