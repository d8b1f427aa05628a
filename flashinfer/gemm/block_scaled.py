# SPDX-License-Identifier: Apache-2.0
"""Products of e2m1 and e4m3 values with scales of blocks, which torch (cuBLASLt) multiplies on Blackwell.

This package has no kernel of its own for them, and they were never run on a Blackwell GPU. The CPU computes the
reference in float32.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, TypeVar

import torch

from .._compat.unsupported import UnsupportedError
from .._runtime.arch import get_compute_capability
from .._runtime.checks import check_tensors
from .._runtime.errors import ArgumentError, BackendSupportedError
from .._runtime.explain_error import explain_type_errors
from .._runtime.integer_math import ceil_div
from ..api_logging import flashinfer_api
from ..trace.templates.gemm_blackwell import mm_fp4_trace, mm_mxfp8_trace

__all__ = ["mm_fp4", "mm_mxfp8"]

F = TypeVar("F", bound=Callable[..., Any])

_BLACKWELL = (100, 103, 110, 120, 121)
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Published backends. Each is the product of torch here, on the devices that have it.
_FP4_BACKENDS = ("cudnn", "cutlass", "trtllm", "cute-dsl", "b12x")
_MXFP8_BACKENDS = ("cudnn", "cutlass", "trtllm", "cute-dsl")


def _answers_queries(*backends: str) -> Callable[[F], F]:
    """Give a function the queries of ``backend_requirement``; published backends run on Blackwell."""

    def decorate(function: F) -> F:
        probed: Any = function
        probed.has_backend = lambda backend: backend in backends
        probed.has_backend_choices = lambda: True
        probed.is_compute_capability_supported = lambda cc: cc in _BLACKWELL
        probed.is_backend_supported = lambda backend, cc=None: backend in backends and (cc is None or cc in _BLACKWELL)
        probed.suitable_auto_backends = []
        return function

    return decorate


def _check_device(op: str, a: torch.Tensor, backend: str, backends: tuple[str, ...]) -> None:
    if backend != "auto" and backend not in backends:
        raise BackendSupportedError(
            f"{op} does not support backend {backend!r}; usable on Blackwell: auto, {', '.join(backends)}"
        )
    if a.is_cpu:
        return
    major, minor = get_compute_capability(a.device)
    if 10 * major + minor not in _BLACKWELL:
        raise UnsupportedError(f"{op}: needs a Blackwell GPU (SM100 on) or CPU tensors, got capability {major}.{minor}")


def _check_operands(
    op: str, a: torch.Tensor, b: torch.Tensor, scales: dict[str, torch.Tensor], block_size: int, values: int
) -> None:
    """Check shapes; ``values`` are those in an element of ``a``."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ArgumentError(f"{op}: a and b must have shapes (m, k) and (k, n), got {tuple(a.shape)}, {tuple(b.shape)}")
    k = a.shape[1] * values
    if k % block_size:
        raise ArgumentError(f"{op}: a must have a multiple of {block_size} values in a row, got {k}")
    for (name, scale), rows in zip(scales.items(), (a.shape[0], b.shape[1]), strict=True):
        least = rows * (k // block_size)
        if scale.dtype.itemsize != 1 or scale.numel() < least:
            raise ArgumentError(
                f"{op}: {name} must have a byte for each block, at least {least}, got {scale.numel()} of {scale.dtype}"
            )


def _finish(op: str, result: torch.Tensor, out: Optional[torch.Tensor], out_dtype: torch.dtype) -> torch.Tensor:
    if out is None:
        return result.to(out_dtype)
    if out.shape != result.shape or out.dtype != out_dtype:
        raise ArgumentError(
            f"{op}: out must be {out_dtype} with shape {tuple(result.shape)}, got {out.dtype}, {tuple(out.shape)}"
        )
    return out.copy_(result)


def _tiled(op: str, name: str, scale: torch.Tensor, rows: int, blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """View scales in tiles of 128 x 4 as cuBLASLt wants them: flat, with all rows of the last tile."""
    size = ceil_div(rows, 128) * 128 * ceil_div(blocks, 4) * 4
    if scale.numel() < size:
        raise ArgumentError(f"{op}: {name} must have {size} elements (tiles of 128 x 4), got {scale.numel()}")
    return scale.contiguous().view(-1)[:size].view(dtype)


@_answers_queries(*_FP4_BACKENDS)
@flashinfer_api(trace=mm_fp4_trace)
@explain_type_errors
def mm_fp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Optional[torch.Tensor] = None,
    block_size: int = 16,
    use_8x4_sf_layout: bool = False,
    backend: str = "auto",
    use_nvfp4: bool = True,
    enable_pdl: bool = True,
    skip_check: bool = False,
) -> torch.Tensor:
    r"""Multiply e2m1 matrices with a scale for each block: ``alpha * (a * a_descale) @ (b * b_descale)``.

    Parameters
    ----------
    a : torch.Tensor
        ``(m, k // 2)`` uint8, two values in a byte.
    b : torch.Tensor
        ``(k // 2, n)`` uint8, column-major.
    a_descale, b_descale : torch.Tensor
        Scales, e4m3 for blocks of 16 or powers of two for blocks of 32, in tiles of 128 x 4.
    alpha : Optional[torch.Tensor]
        Scale of the result, one float32.
    out_dtype : torch.dtype
        bfloat16, float16 or float32.
    out : Optional[torch.Tensor]
        Output buffer.
    block_size : int
        16 with ``use_nvfp4``, 32 without.
    use_8x4_sf_layout : bool
        Whether ``a_descale`` is in tiles of 8 x 4; on the CPU only.
    backend : str
        ``"auto"`` or a published name: all are the product of torch.
    use_nvfp4 : bool
        Whether scales are e4m3 numbers; powers of two on the CPU only.
    enable_pdl : bool
        Accepted; torch has no such option.
    skip_check : bool
        Accepted; arguments are always checked.

    Returns
    -------
    torch.Tensor
        ``(m, n)``.

    Examples
    --------
    >>> call = flashinfer.mm_fp4.fi_init(M=3, N=64, K=64, device="cpu")
    >>> flashinfer.mm_fp4(**call).shape
    torch.Size([3, 64])
    """
    op = "mm_fp4"
    _check_device(op, a, backend, _FP4_BACKENDS)
    check_tensors(op, a=a, b=b, a_descale=a_descale, b_descale=b_descale)
    if block_size != (16 if use_nvfp4 else 32):
        raise ArgumentError(f"{op}: block_size must be {16 if use_nvfp4 else 32}, got {block_size}")
    if out_dtype not in _OUT_DTYPES:
        raise ArgumentError(f"{op}: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    _check_operands(op, a, b, {"a_descale": a_descale, "b_descale": b_descale}, block_size, 2)
    if a.is_cpu:
        assert mm_fp4_trace.reference is not None
        result = mm_fp4_trace.reference(
            *(a, b, a_descale, b_descale, alpha, out_dtype, block_size, use_8x4_sf_layout, use_nvfp4)
        )
        return _finish(op, result, out, out_dtype)
    if use_8x4_sf_layout or not use_nvfp4:
        raise UnsupportedError(
            f"{op}: use_8x4_sf_layout must be False and use_nvfp4 True on a GPU (torch has no other product), got "
            f"{use_8x4_sf_layout} and {use_nvfp4}"
        )
    blocks = 2 * a.shape[1] // block_size
    result = torch._scaled_mm(
        a.view(torch.float4_e2m1fn_x2),
        b.T.contiguous().view(torch.float4_e2m1fn_x2).T,
        scale_a=_tiled(op, "a_descale", a_descale, a.shape[0], blocks, torch.float8_e4m3fn),
        scale_b=_tiled(op, "b_descale", b_descale, b.shape[1], blocks, torch.float8_e4m3fn),
        # A product without alpha may leave the range of 16 bits before alpha brings it back.
        out_dtype=out_dtype if alpha is None else torch.float32,
    )
    return _finish(op, result if alpha is None else result * alpha.reshape(()), out, out_dtype)


@_answers_queries(*_MXFP8_BACKENDS)
@flashinfer_api(trace=mm_mxfp8_trace)
@explain_type_errors
def mm_mxfp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    out: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_8x4_sf_layout: bool = False,
    backend: str = "auto",
    skip_check: bool = False,
) -> torch.Tensor:
    r"""Multiply e4m3 matrices with a power of two for each 32 values of a row of ``a`` and a column of ``b``.

    Parameters
    ----------
    a : torch.Tensor
        ``(m, k)`` float8_e4m3fn.
    b : torch.Tensor
        ``(k, n)`` float8_e4m3fn, column-major.
    a_descale, b_descale : torch.Tensor
        Exponents, uint8, in tiles of 128 x 4.
    out : Optional[torch.Tensor]
        Output buffer.
    out_dtype : torch.dtype
        bfloat16, float16 or float32.
    use_8x4_sf_layout : bool
        Whether ``a_descale`` is in tiles of 8 x 4; on the CPU only.
    backend : str
        ``"auto"`` or a published name: all are the product of torch.
    skip_check : bool
        Accepted; arguments are always checked.

    Returns
    -------
    torch.Tensor
        ``(m, n)``.

    Examples
    --------
    >>> call = flashinfer.mm_mxfp8.fi_init(M=3, N=64, K=128, device="cpu")
    >>> flashinfer.mm_mxfp8(**call).shape
    torch.Size([3, 64])
    """
    op = "mm_mxfp8"
    _check_device(op, a, backend, _MXFP8_BACKENDS)
    check_tensors(op, a=a, b=b, a_descale=a_descale, b_descale=b_descale)
    if a.dtype != torch.float8_e4m3fn or b.dtype != torch.float8_e4m3fn:
        raise ArgumentError(f"{op}: a and b must be float8_e4m3fn, got {a.dtype} and {b.dtype}")
    if out_dtype not in _OUT_DTYPES:
        raise ArgumentError(f"{op}: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    _check_operands(op, a, b, {"a_descale": a_descale, "b_descale": b_descale}, 32, 1)
    if a.is_cpu:
        assert mm_mxfp8_trace.reference is not None
        result = mm_mxfp8_trace.reference(a, b, a_descale, b_descale, out_dtype, use_8x4_sf_layout)
        return _finish(op, result, out, out_dtype)
    if use_8x4_sf_layout:
        raise UnsupportedError(f"{op}: use_8x4_sf_layout must be False on a GPU (torch has tiles of 128 x 4), got True")
    blocks = a.shape[1] // 32
    result = torch._scaled_mm(
        a.contiguous(),
        b.T.contiguous().T,
        scale_a=_tiled(op, "a_descale", a_descale, a.shape[0], blocks, torch.float8_e8m0fnu),
        scale_b=_tiled(op, "b_descale", b_descale, b.shape[1], blocks, torch.float8_e8m0fnu),
        out_dtype=out_dtype,
    )
    return _finish(op, result, out, out_dtype)
