# SPDX-License-Identifier: Apache-2.0
"""grouped_mm: rows ``m_indptr[e] .. m_indptr[e + 1]`` times the transposed weight matrix of expert ``e``."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from .._compat.unsupported import UnsupportedError, needs
from .._runtime.allocation import allocate
from .._runtime.arch import capability_of
from .._runtime.checks import is_float8
from .._runtime.codegen_wrapper import compiler, is_traced, wrap_with
from .._runtime.errors import ArgumentError, BackendSupportedError
from .._runtime.kept import KeptLaunches
from .._runtime.requirements import backend_requirement, supported_compute_capability
from ..api_logging import flashinfer_api
from ..gemm.launch import PACKED, grouped_product, noting, ordinary_product
from ..trace.templates.gemm_grouped import grouped_mm_bf16_trace, grouped_mm_fp8_trace
from .cudnn import BF16_CCS, BLACKWELL_CCS, FP8_CCS, accept_bf16, accept_fp8

__all__ = [
    "grouped_mm_bf16",
    "grouped_mm_fp4",
    "grouped_mm_fp8",
    "grouped_mm_mxfp8",
    "moe_gemm_fp8_nt_groupwise",
    "moe_gemm_mxfp8_nt_groupwise",
]

_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


def _check_groups(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out: Optional[torch.Tensor],
    out_dtype: torch.dtype,
) -> None:
    if a.ndim != 2:
        raise ArgumentError(f"{op}: a must be 2D, (cum_m, k), got shape {tuple(a.shape)}")
    if b.ndim != 3:
        raise ArgumentError(f"{op}: b must be 3D, (experts, n, k), got shape {tuple(b.shape)}")
    if m_indptr.dtype is not torch.int32:
        raise ArgumentError(f"{op}: m_indptr must be int32, got {m_indptr.dtype}")
    experts, n, k = b.shape
    if m_indptr.shape != (experts + 1,):
        raise ArgumentError(f"{op}: m_indptr length must be experts + 1 = {experts + 1}, got {tuple(m_indptr.shape)}")
    if a.shape[1] != k:
        raise ArgumentError(f"{op}: K mismatch: a and b must have the same k, got {a.shape[1]} and {k}")
    dtype = out_dtype if out is None else out.dtype
    if dtype not in _OUTPUTS:
        raise ArgumentError(f"{op}: Unsupported output dtype: must be bfloat16, float16 or float32, got {dtype}")
    if out is None:
        return
    if out.shape != (a.shape[0], n):
        raise ArgumentError(f"{op}: out shape must be {(a.shape[0], n)}, got {tuple(out.shape)}")
    if out.device != a.device:
        raise ArgumentError(f"{op}: out device must be {a.device}, got {out.device}")


@supported_compute_capability(BF16_CCS)
def _check_grouped_mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> bool:
    if a.dtype is not torch.bfloat16 or b.dtype is not torch.bfloat16:
        raise ArgumentError(f"grouped_mm_bf16: dtype of a and b must be bfloat16, got {a.dtype} and {b.dtype}")
    _check_groups("grouped_mm_bf16", a, b, m_indptr, out, out_dtype)
    return True


@supported_compute_capability(FP8_CCS)
def _check_grouped_mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    alpha: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> bool:
    op = "grouped_mm_fp8"
    if not (is_float8(a) and is_float8(b)):
        raise ArgumentError(f"{op}: dtype of a and b must be float8_e4m3fn or float8_e5m2, got {a.dtype} and {b.dtype}")
    _check_groups(op, a, b, m_indptr, out, out_dtype)
    if alpha is not None:
        if alpha.dtype is not torch.float32:
            raise ArgumentError(f"{op}: alpha must be float32, got {alpha.dtype}")
        if alpha.numel() != 1:
            raise ArgumentError(f"{op}: alpha must be a scalar, one element, got shape {tuple(alpha.shape)}")
    return True


_CALL = """
try:
    return _func({arguments}, skip_check=skip_check)
except _Refused as error:
    _refuse(error, backend)
    raise
"""


def _refuses_by_value(func: Callable[..., Any]) -> Callable[..., Any]:
    """Let an unknown backend raise an error that is a ``ValueError`` too, with the published text."""

    def refuse(error: BackendSupportedError, backend: str) -> None:
        if not func.has_backend(backend):  # type: ignore[attr-defined]
            raise UnsupportedError(f"{error} ({backend} backend does not support {func.__name__})") from None

    names = {"_Refused": BackendSupportedError, "_refuse": refuse}
    return wrap_with(func, _CALL, names, extra={"skip_check": False})


_HOPPER = 90


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out: Optional[torch.Tensor],
    out_dtype: torch.dtype,
    index: int,
) -> Optional[torch.Tensor]:
    if out is None:
        m, n = a.shape[0], b.shape[1]
        out = allocate((m, n), (n or 1, 1), out_dtype, index)
    return out if ordinary_product["bf16"](out, a, b, None, None, None, m_indptr, PACKED, 0) else None


_launches = KeptLaunches("backend, (index := a.get_device())", passed="a, b, m_indptr, out, out_dtype, index")


@flashinfer_api(trace=grouped_mm_bf16_trace)
@_launches
@_refuses_by_value
@backend_requirement(backend_checks={"cudnn": accept_bf16}, common_check=_check_grouped_mm_bf16)
def grouped_mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    r"""Product of each expert's rows with its weights: ``out[i] = a[i] @ b[e].T`` for ``m_indptr[e] <= i <
    m_indptr[e + 1]``. Sums are fp32, rounded once.

    Parameters
    ----------
    a : torch.Tensor
        ``(cum_m, k)`` bfloat16, rows sorted by expert.
    b : torch.Tensor
        ``(experts, n, k)`` bfloat16.
    m_indptr : torch.Tensor
        ``(experts + 1,)`` int32 on the device of ``a``, not decreasing, from 0 to cum_m. Experts may have no rows. The
        host does not read the values.
    out : Optional[torch.Tensor]
        ``(cum_m, n)``, written and returned when given; its dtype wins over ``out_dtype``.
    out_dtype : torch.dtype
        bfloat16, float16 or float32.
    backend : str
        "cudnn" or "auto": names of the published API, behind which our kernels run.
    tactic : int
        Accepted for compatibility and ignored.

    Returns
    -------
    torch.Tensor
        ``(cum_m, n)``.
    """
    made = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype) if out is None else out
    grouped_product(made, a, b, None, None, m_indptr, PACKED)
    if not (is_traced() or compiler._is_compiling_flag) and capability_of[a.get_device()] == _HOPPER:
        launch = noting(_launch, grouped_mm_bf16.suitable_auto_backends) if backend == "auto" else _launch
        _launches.keep(launch, "SM90", a, b, m_indptr, out, out_dtype, backend, tactic)
    return made


@flashinfer_api(trace=grouped_mm_fp8_trace)
@_refuses_by_value
@backend_requirement(backend_checks={"cudnn": accept_fp8}, common_check=_check_grouped_mm_fp8)
def grouped_mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    alpha: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    r"""Product of each expert's fp8 rows with its fp8 weights, times ``alpha``. Sums are fp32, rounded once.

    Parameters
    ----------
    a : torch.Tensor
        ``(cum_m, k)`` float8_e4m3fn or float8_e5m2, rows sorted by expert.
    b : torch.Tensor
        ``(experts, n, k)`` float8_e4m3fn or float8_e5m2, in any combination with ``a``.
    m_indptr : torch.Tensor
        ``(experts + 1,)`` int32 on the device of ``a``, not decreasing, from 0 to cum_m. Experts may have no rows. The
        host does not read the values.
    alpha : Optional[torch.Tensor]
        One float32 on the device of ``a``, a factor of the result; None means 1.
    out : Optional[torch.Tensor]
        ``(cum_m, n)``, written and returned when given; its dtype wins over ``out_dtype``.
    out_dtype : torch.dtype
        bfloat16, float16 or float32.
    backend : str
        "cudnn" or "auto": names of the published API, behind which our kernels run.
    tactic : int
        Accepted for compatibility and ignored.

    Returns
    -------
    torch.Tensor
        ``(cum_m, n)``.
    """
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)
    grouped_product(out, a, b, alpha, None, m_indptr, PACKED)
    return out


_BLACKWELL = "a Blackwell GPU (SM100 on) and kernels for it, which this package does not have"

grouped_mm_mxfp8 = needs("grouped_mm_mxfp8", _BLACKWELL)
grouped_mm_fp4 = needs("grouped_mm_fp4", _BLACKWELL)
moe_gemm_fp8_nt_groupwise = needs("moe_gemm_fp8_nt_groupwise", _BLACKWELL)
moe_gemm_mxfp8_nt_groupwise = needs("moe_gemm_mxfp8_nt_groupwise", _BLACKWELL)
# Published checks, which callers ask for capabilities; a call says what is missing.
_check_grouped_mm_mxfp8 = supported_compute_capability(BLACKWELL_CCS)(needs("grouped_mm_mxfp8", _BLACKWELL))
_check_grouped_mm_fp4 = supported_compute_capability(BLACKWELL_CCS)(needs("grouped_mm_fp4", _BLACKWELL))
