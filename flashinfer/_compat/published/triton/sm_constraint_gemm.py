# SPDX-License-Identifier: Apache-2.0
"""Products ``alpha * a @ b + beta * c`` under the module path of their published Triton versions, over our kernels.

The published kernels run on a limited number of SMs, so that other work can run beside them. Ours take the number as a
hint: it is checked and has no effect on the result. A green context (:mod:`flashinfer.green_ctx`) limits any kernel.
"""

from __future__ import annotations

from typing import Optional

import torch

from flashinfer._runtime.errors import ArgumentError
from flashinfer.api_logging import flashinfer_api
from flashinfer.gemm.launch import BATCHED, grouped_product
from flashinfer.trace.templates.gemm_grouped import (
    sm_constraint_gemm_descriptor_persistent_trace,
    sm_constraint_gemm_persistent_trace,
    sm_constraint_gemm_trace,
)

__all__ = ["gemm", "gemm_descriptor_persistent", "gemm_persistent"]

_E4M3 = torch.float8_e4m3fn
_OPERANDS = (_E4M3, torch.float16, torch.bfloat16, torch.float32)
_RESULTS = (torch.float16, torch.bfloat16, torch.float32)


def _check_num_sms(op: str, num_sms: Optional[int]) -> None:
    if num_sms is not None and (not isinstance(num_sms, int) or num_sms < 1):
        raise ArgumentError(f"{op}: num_sms must be a positive integer or None, got {num_sms!r}")


def _multiply(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    c: Optional[torch.Tensor],
    alpha: float,
    beta: float,
    out_dtype: Optional[torch.dtype],
) -> torch.Tensor:
    """Multiply ``(m, k)`` by the transpose of ``(n, k)``, both of any strides."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ArgumentError(
            f"{op}: Incompatible dimensions: a must be (m, k) and b must have the same k, got {tuple(a.shape)} and a "
            f"matrix of {b.shape[-1]} by {b.shape[0]}"
        )
    if a.dtype != b.dtype or a.dtype not in _OPERANDS:
        raise ArgumentError(
            f"{op}: Incompatible dtypes: a and b must both be float8_e4m3fn, float16, bfloat16 or float32, got "
            f"{a.dtype} and {b.dtype}"
        )
    if out_dtype is not None and out_dtype not in _RESULTS:
        raise ArgumentError(f"{op}: Incompatible dtypes: out_dtype must be one of {_RESULTS}, got {out_dtype}")
    if c is None:
        dtype = out_dtype or (torch.bfloat16 if a.dtype == _E4M3 else a.dtype)
        c, beta = a.new_empty((a.shape[0], b.shape[0]), dtype=dtype), 0.0  # there is no former C
    else:
        if c.shape != (a.shape[0], b.shape[0]):
            raise ArgumentError(
                f"{op}: Incompatible dimensions: c must have shape {(a.shape[0], b.shape[0])}, got {tuple(c.shape)}"
            )
        if c.dtype not in _RESULTS or (out_dtype is not None and c.dtype != out_dtype):
            raise ArgumentError(
                f"{op}: Incompatible dtypes: c must have dtype {out_dtype or 'float16, bfloat16 or float32'}, got "
                f"{c.dtype}"
            )
    grouped_product(c, a, b, None, None, None, BATCHED, alpha=float(alpha), beta=float(beta))
    return c


@flashinfer_api(trace=sm_constraint_gemm_trace)
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: Optional[torch.Tensor] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out_dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    r"""Compute ``alpha * a @ b + beta * c``, in place in ``c`` when given. Sums are fp32, rounded once.

    Parameters
    ----------
    a : torch.Tensor
        ``(m, k)`` float8_e4m3fn, float16, bfloat16 or float32, of any strides.
    b : torch.Tensor
        ``(k, n)``, dtype of ``a``, of any strides.
    c : Optional[torch.Tensor]
        ``(m, n)``, read if ``beta`` is not 0, written and returned.
    alpha, beta : float
        Factors of the product and of the former ``c``.
    out_dtype : Optional[torch.dtype]
        dtype of the result without ``c``; default the dtype of ``a``, or bfloat16 for float8.

    Returns
    -------
    torch.Tensor
        ``(m, n)``.
    """
    return _multiply("gemm", a, b.mT, c, alpha, beta, out_dtype)


@flashinfer_api(trace=sm_constraint_gemm_persistent_trace)
def gemm_persistent(
    a: torch.Tensor,
    b: torch.Tensor,
    c: Optional[torch.Tensor] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out_dtype: Optional[torch.dtype] = None,
    num_sms: Optional[int] = None,
) -> torch.Tensor:
    r"""Compute ``alpha * a @ b + beta * c``; the other arguments are those of :func:`gemm`.

    Parameters
    ----------
    num_sms : Optional[int]
        SMs to use, at least 1: a hint without effect on the result.

    Returns
    -------
    torch.Tensor
        ``(m, n)``.
    """
    _check_num_sms("gemm_persistent", num_sms)
    return _multiply("gemm_persistent", a, b.mT, c, alpha, beta, out_dtype)


@flashinfer_api(trace=sm_constraint_gemm_descriptor_persistent_trace)
def gemm_descriptor_persistent(
    a: torch.Tensor,
    b: torch.Tensor,
    c: Optional[torch.Tensor] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    out_dtype: Optional[torch.dtype] = None,
    num_sms: Optional[int] = None,
    EPILOGUE_SUBTILE: bool = False,
) -> torch.Tensor:
    r"""Compute ``alpha * a @ b.T + beta * c`` for a contiguous ``b``; the other arguments are those of :func:`gemm`.

    Parameters
    ----------
    b : torch.Tensor
        ``(n, k)``, contiguous, not float32; rows of 16 bytes at least, in ``b`` and in the result.
    num_sms : Optional[int]
        SMs to use, at least 1: a hint without effect on the result.
    EPILOGUE_SUBTILE : bool
        Accepted for compatibility and ignored.

    Returns
    -------
    torch.Tensor
        ``(m, n)``.
    """
    op = "gemm_descriptor_persistent"
    _check_num_sms(op, num_sms)
    if b.dtype == torch.float32:
        raise ArgumentError(f"{op}: Incompatible dtypes: b must be float8_e4m3fn, float16 or bfloat16, got {b.dtype}")
    if b.ndim == 2:
        if not b.is_contiguous():
            raise ArgumentError(f"{op}: b must be contiguous, (n, k), got strides {b.stride()}")
        if min(b.shape) * b.element_size() < 16:
            raise ArgumentError(
                f"{op}: Incompatible dimensions: n and k must have at least 16 bytes, got {tuple(b.shape)} of {b.dtype}"
            )
    return _multiply(op, a, b, c, alpha, beta, out_dtype)
