# SPDX-License-Identifier: Apache-2.0
"""Products of fp8 matrices with block scales in the two layouts of DeepGEMM: contiguous and masked groups of rows."""

from __future__ import annotations

from typing import Optional

import torch

from .._runtime.allocation import allocate
from .._runtime.arch import AMPERE_ON, CPU, capability_of
from .._runtime.codegen_wrapper import compiler, is_traced
from .._runtime.errors import ArgumentError, BackendSupportedError
from .._runtime.kept import KeptLaunches
from .._runtime.requirements import backend_requirement, supported_compute_capability
from ..api_logging import flashinfer_api
from ..trace.templates.gemm_groupwise import (
    batch_deepgemm_fp8_nt_groupwise_trace,
    group_deepgemm_fp8_nt_groupwise_trace,
)
from .groupwise_checks import check_counts, check_deepgemm
from .launch import CONTIGUOUS, MASKED, grouped_product, is_sm90, ordinary_product

__all__ = ["batch_deepgemm_fp8_nt_groupwise", "group_deepgemm_fp8_nt_groupwise"]

_BF16, _E4M3 = torch.bfloat16, torch.float8_e4m3fn
_BLOCKS, _HOPPER = (1, 128, 128), 90

Granularity = tuple[int, int, int]


def _is_checked_by_kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    granularity: Granularity,
    out: Optional[torch.Tensor],
    out_dtype: Optional[torch.dtype],
) -> bool:
    """Return True if the native code refuses all that is wrong with a call: it checks shapes in a tenth of the time.

    Here is what the native code also takes. Its errors are worded by the functions below, as published.
    """
    return (
        not (is_traced() or compiler._is_compiling_flag)
        and is_sm90(a)
        and granularity == (1, 128, 128)
        and a.dtype is _E4M3
        and b.dtype is _E4M3
        and a.is_contiguous()
        and b.is_contiguous()
        and (out_dtype is None or out_dtype is _BF16)
        and (out is None or (out.dtype is _BF16 and out.is_contiguous()))
    )


def _refuse_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    granularity: Granularity,
    out: Optional[torch.Tensor],
    out_dtype: Optional[torch.dtype],
) -> None:
    """Raise the error of the first wrong argument, if any."""
    op = "group_deepgemm_fp8_nt_groupwise"
    if a.ndim != 2:
        raise ArgumentError(f"{op}: a must have shape (m, k), got {tuple(a.shape)}")
    check_deepgemm(op, a, b, a_scale, b_scale, granularity, out, out_dtype)
    check_counts(op, "m_indices", m_indices, a)


@supported_compute_capability([CPU, *AMPERE_ON])
def _check_group_deepgemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    scale_granularity_mnk: Granularity = (1, 128, 128),
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> bool:
    if not _is_checked_by_kernel(a, b, scale_granularity_mnk, out, out_dtype):
        _refuse_contiguous(a, b, a_scale, b_scale, m_indices, scale_granularity_mnk, out, out_dtype)
    return True


def _launch_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    out: Optional[torch.Tensor],
    index: int,
) -> Optional[torch.Tensor]:
    if out is None:
        m, n = a.shape[0], b.shape[1]
        out = allocate((m, n), (n or 1, 1), _BF16, index)
    elif out.dtype is not _BF16:
        return None
    return out if ordinary_product["fp8_block"](out, a, b, a_scale, b_scale, None, m_indices, CONTIGUOUS, 0) else None


def _is_kept(a: torch.Tensor, granularity: Granularity) -> bool:
    return (
        not (is_traced() or compiler._is_compiling_flag)
        and granularity == _BLOCKS
        and capability_of[a.get_device()] == _HOPPER
    )


_contiguous_launches = KeptLaunches(
    "scale_granularity_mnk, out_dtype, (index := a.get_device())",
    passed="a, b, a_scale, b_scale, m_indices, out, index",
)


@flashinfer_api(trace=group_deepgemm_fp8_nt_groupwise_trace)
@_contiguous_launches
@backend_requirement(backend_checks={}, common_check=_check_group_deepgemm)
def group_deepgemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indices: torch.Tensor,
    scale_granularity_mnk: Granularity = (1, 128, 128),
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    r"""Product of each row with the fp8 matrix of its group, in the contiguous layout of DeepGEMM:
    ``out[i] = a[i] @ b[m_indices[i]].T``.

    Parameters
    ----------
    a : torch.Tensor
        ``(m, k)`` float8_e4m3fn. Rows of a group are consecutive and every group begins at a multiple of 128 rows; the
        group of 128 rows is read from the first of them. Nothing happens if m is 0.
    b : torch.Tensor
        ``(groups, n, k)`` float8_e4m3fn.
    a_scale : torch.Tensor
        ``(m, k / 128)`` float32 factors of any size and strides.
    b_scale : torch.Tensor
        ``(groups, n / 128, k / 128)`` float32.
    m_indices : torch.Tensor
        ``(m,)`` int32 on the device of ``a``, the group of each row; -1 marks rows that are not computed.
    scale_granularity_mnk : tuple of int
        (1, 128, 128), the only one there is.
    out : Optional[torch.Tensor]
        ``(m, n)`` bfloat16, written and returned when given; rows that are not computed are left as they are.
    out_dtype : Optional[torch.dtype]
        bfloat16, the only one there is.

    Returns
    -------
    torch.Tensor
        ``(m, n)``.

    Examples
    --------
    >>> a, b = torch.ones(256, 128).to(torch.float8_e4m3fn), torch.ones(2, 128, 128).to(torch.float8_e4m3fn)
    >>> a_scale, b_scale = torch.ones(256, 1), torch.tensor([1.0, 2.0]).view(2, 1, 1)
    >>> m_indices = torch.arange(2).repeat_interleave(128).int()
    >>> y = flashinfer.gemm.group_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, m_indices)
    >>> y[0, 0].item(), y[128, 0].item()
    (128.0, 256.0)
    """
    made = torch.empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16, device=a.device) if out is None else out
    try:
        grouped_product(made, a, b, a_scale, b_scale, m_indices, CONTIGUOUS, 1, 128, 128)
    except ArgumentError:
        _refuse_contiguous(a, b, a_scale, b_scale, m_indices, scale_granularity_mnk, out, out_dtype)
        raise
    if _is_kept(a, scale_granularity_mnk):
        call = (a, b, a_scale, b_scale, m_indices, scale_granularity_mnk, out, out_dtype)
        _contiguous_launches.keep(_launch_contiguous, "SM90", *call)
    return made


def _refuse_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    granularity: Granularity,
    out: Optional[torch.Tensor],
    out_dtype: Optional[torch.dtype],
) -> None:
    """Raise the error of the first wrong argument, if any."""
    op = "batch_deepgemm_fp8_nt_groupwise"
    if a.ndim != 3 or a.shape[0] != b.shape[0]:
        raise ArgumentError(f"{op}: a must have shape ({b.shape[0]}, m, k), as many groups as b, got {tuple(a.shape)}")
    check_deepgemm(op, a, b, a_scale, b_scale, granularity, out, out_dtype)
    check_counts(op, "masked_m", masked_m, a)
    if expected_m < 1:
        raise ArgumentError(f"{op}: expected_m must be positive, got {expected_m}")


@supported_compute_capability([CPU, *AMPERE_ON])
def _check_batch_deepgemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    scale_granularity_mnk: Granularity = (1, 128, 128),
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    backend: str = "deepgemm",
) -> bool:
    if backend != "deepgemm":
        raise BackendSupportedError(
            f"batch_deepgemm_fp8_nt_groupwise does not support backend '{backend}'; usable here: deepgemm"
        )
    if expected_m < 1 or not _is_checked_by_kernel(a, b, scale_granularity_mnk, out, out_dtype):
        _refuse_masked(a, b, a_scale, b_scale, masked_m, expected_m, scale_granularity_mnk, out, out_dtype)
    return True


def _launch_masked(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    out: Optional[torch.Tensor],
    index: int,
) -> Optional[torch.Tensor]:
    if out is None:
        (groups, m, _), n = a.shape, b.shape[1]
        out = allocate((groups, m, n), ((m or 1) * (n or 1), n or 1, 1), _BF16, index)
    elif out.dtype is not _BF16:
        return None
    is_taken = ordinary_product["fp8_block"](out, a, b, a_scale, b_scale, None, masked_m, MASKED, expected_m)
    return out if is_taken else None


_masked_launches = KeptLaunches(
    "scale_granularity_mnk, out_dtype, expected_m < 1, backend, (index := a.get_device())",
    passed="a, b, a_scale, b_scale, masked_m, expected_m, out, index",
)


@flashinfer_api(trace=batch_deepgemm_fp8_nt_groupwise_trace)
@_masked_launches
@backend_requirement(backend_checks={}, common_check=_check_batch_deepgemm)
def batch_deepgemm_fp8_nt_groupwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    scale_granularity_mnk: Granularity = (1, 128, 128),
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
    backend: str = "deepgemm",
) -> torch.Tensor:
    r"""Product of the first rows of each group with the fp8 matrix of the group, in the masked layout of DeepGEMM:
    ``out[g, :masked_m[g]] = a[g, :masked_m[g]] @ b[g].T``. Other rows are not written.

    Parameters
    ----------
    a : torch.Tensor
        ``(groups, m, k)`` float8_e4m3fn.
    b : torch.Tensor
        ``(groups, n, k)`` float8_e4m3fn.
    a_scale : torch.Tensor
        ``(groups, m, k / 128)`` float32 factors of any size and strides.
    b_scale : torch.Tensor
        ``(groups, n / 128, k / 128)`` float32.
    masked_m : torch.Tensor
        ``(groups,)`` int32 on the device of ``a``, rows of each group that are computed. The host does not read them,
        so that a CUDA graph can replay with other counts.
    expected_m : int
        Rows that a group has on average, at least 1: chooses the tile, without effect on the result.
    scale_granularity_mnk : tuple of int
        (1, 128, 128), the only one there is.
    out : Optional[torch.Tensor]
        ``(groups, m, n)`` bfloat16, written and returned when given.
    out_dtype : Optional[torch.dtype]
        bfloat16, the only one there is.
    backend : str
        "deepgemm", the only one there is.

    Returns
    -------
    torch.Tensor
        ``(groups, m, n)``.

    Examples
    --------
    >>> a, b = torch.ones(2, 4, 128).to(torch.float8_e4m3fn), torch.ones(2, 128, 128).to(torch.float8_e4m3fn)
    >>> a_scale, b_scale = torch.ones(2, 4, 1), torch.tensor([1.0, 2.0]).view(2, 1, 1)
    >>> rows = torch.tensor([4, 1]).int()  # rows of each group that are computed
    >>> y = flashinfer.gemm.batch_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, rows, expected_m=2)
    >>> y[0, 3, 0].item(), y[1, 0, 0].item()
    (128.0, 256.0)
    """
    made = torch.empty((*a.shape[:2], b.shape[1]), dtype=torch.bfloat16, device=a.device) if out is None else out
    try:
        grouped_product(made, a, b, a_scale, b_scale, masked_m, MASKED, 1, 128, 128, expected_m)
    except ArgumentError:
        _refuse_masked(a, b, a_scale, b_scale, masked_m, expected_m, scale_granularity_mnk, out, out_dtype)
        raise
    if _is_kept(a, scale_granularity_mnk):
        call = (a, b, a_scale, b_scale, masked_m, expected_m, scale_granularity_mnk, out, out_dtype, backend)
        _masked_launches.keep(_launch_masked, "SM90", *call)
    return made
