# SPDX-License-Identifier: Apache-2.0
"""Batched fp8 products with one scale per tensor."""

from __future__ import annotations

from typing import Optional, Sequence

import torch

from .._runtime.allocation import allocate
from .._runtime.arch import AMPERE_ON, CPU, capability_of
from .._runtime.codegen_wrapper import compiler, is_traced
from .._runtime.errors import ArgumentError
from .._runtime.kept import KeptLaunches
from .._runtime.requirements import backend_requirement, supported_compute_capability
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.gemm import bmm_fp8_trace
from .checks import refuse_output, refuse_shapes, refuse_shared_memory, serves_all
from .decide import LARGE_FP8, MANY_ROWS, SMALL_FP8, has_few_rows, prefers_torch_fp8, streams_fp8
from .launch import ordinary_product, product
from .torch_product import torch_bmm_fp8, torch_scaled_mm
from .tuning import layout_facts, tuned_bmm_fp8

__all__ = ["bmm_fp8"]

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_FP8 = (_E4M3, _E5M2)
_OUTPUTS = (torch.bfloat16, torch.float16)
_HOPPER = 90


@register_custom_op("flashinfer::bmm_fp8", mutates_args=("out",))
def _bmm_fp8(
    out: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    with_torch: Optional[bool],
) -> None:
    if A.is_cuda and with_torch is None:
        with_torch = prefers_torch_fp8(out, A, B)
    if A.is_cuda and with_torch:
        torch_bmm_fp8(out, A, B, A_scale, B_scale)
    else:
        product(out, A, B.mT, a_scale=A_scale, b_scale=B_scale)


def _is_scale(scale: torch.Tensor) -> bool:
    return scale.dtype is torch.float32 and scale.numel() == 1


@supported_compute_capability([CPU, *AMPERE_ON])
def _check_bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: Optional[torch.Tensor] = None,
    backend: str = "cublas",
) -> bool:
    a, b = A.shape, B.shape
    if (
        len(a) == 3 == len(b)
        and a[0] == b[0]
        and a[2] == b[1]
        and (A.dtype is _E4M3 or (A.dtype is _E5M2 and B.dtype is not _E5M2))
        and B.dtype in _FP8
        and dtype in _OUTPUTS
        and _is_scale(A_scale)
        and _is_scale(B_scale)
        and (out is None or (out.dtype is dtype and out.shape == (a[0], a[1], b[2]) and out.device == A.device))
    ):
        return True
    op = "bmm_fp8"
    for name, x in (("A", A), ("B", B)):
        if x.dtype not in _FP8:
            raise ArgumentError(f"{op}: unsupported dtype: {name} must be float8_e4m3fn or float8_e5m2, got {x.dtype}")
    if A.dtype is _E5M2 and B.dtype is _E5M2:
        raise ArgumentError(f"{op}: unsupported dtype: A or B must be float8_e4m3fn, got {A.dtype} twice")
    refuse_shapes(op, ("A", "B"), A, B, 3)
    for name, scale in (("A_scale", A_scale), ("B_scale", B_scale)):
        if not _is_scale(scale):
            kind = f"{scale.dtype} {tuple(scale.shape)}"
            raise ArgumentError(f"{op}: {name} must be float32 with one element, got {kind}")
    refuse_output(op, out, (a[0], a[1], b[2]), A.device, dtype, _OUTPUTS)
    return True


def _launch_own(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: Optional[torch.Tensor],
    a_shape: Sequence[int],
    b_shape: Sequence[int],
    index: int,
) -> Optional[torch.Tensor]:
    if out is None:
        (batch, m, _), n = a_shape, b_shape[2]
        out = allocate((batch, m, n), ((m or 1) * (n or 1), n or 1, 1), dtype, index)
    elif out.dtype is not dtype or len(a_shape) != 3:
        return None
    return out if ordinary_product["fp8"](out, A, B, A_scale, B_scale, None, None, 0, 0) else None


def _launch_torch(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: Optional[torch.Tensor],
    a_shape: Sequence[int],
    b_shape: Sequence[int],
    index: int,
) -> Optional[torch.Tensor]:
    return torch_scaled_mm(A, B, A_scale, B_scale, dtype, out, a_shape, b_shape)


_launches = KeptLaunches(
    "m if (m := (a_shape := A.shape)[1]) < MANY_ROWS else MANY_ROWS, (b_shape := B.shape), dtype, "
    "(index := A.get_device()), "
    "backend if backend != 'auto' else layout_facts(a_shape, b_shape, A, B, A_scale, B_scale, out)",
    passed="A, B, A_scale, B_scale, dtype, out, a_shape, b_shape, index",
    MANY_ROWS=MANY_ROWS,
    layout_facts=layout_facts,
)


@flashinfer_api(trace=bmm_fp8_trace)
@_launches
@backend_requirement({"cublas": serves_all, "cudnn": serves_all}, common_check=_check_bmm_fp8)
def bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: Optional[torch.Tensor] = None,
    backend: str = "cublas",
) -> torch.Tensor:
    r"""Batched product of fp8 matrices, ``(A @ B) * A_scale * B_scale``: sums in float32, rounded once.

    Parameters
    ----------
    A : torch.Tensor
        ``(batch, m, k)``, float8_e4m3fn or float8_e5m2.
    B : torch.Tensor
        ``(batch, k, n)``, float8_e4m3fn or float8_e5m2, but not float8_e5m2 with an ``A`` of float8_e5m2. Column-major
        (the transposed view of ``(batch, n, k)``) is the fast layout; any strides are taken.
    A_scale, B_scale : torch.Tensor
        float32 with one element, 0-d or ``(1,)``, on the device of ``A``. They are read there, so nothing waits.
    dtype : torch.dtype
        torch.bfloat16 or torch.float16.
    out : Optional[torch.Tensor]
        ``(batch, m, n)`` of ``dtype``; written and returned when given.
    backend : str
        ``"cublas"`` or ``"cudnn"`` (both choose torch's cuBLASLt or our kernel by a rule, see ``gemm/decide.py``), or
        ``"auto"``: the choice of the autotuner, by the same rule where nothing was tuned.

    Returns
    -------
    torch.Tensor
        ``(batch, m, n)``.

    Examples
    --------
    >>> x, w = torch.randn(1, 4, 64).to(torch.float8_e4m3fn), torch.randn(1, 32, 64).to(torch.float8_e4m3fn)
    >>> y = flashinfer.bmm_fp8(x, w.mT, torch.tensor(0.5), torch.tensor(2.0), torch.bfloat16)
    """
    made = torch.empty((*A.shape[:2], B.shape[2]), dtype=dtype, device=A.device) if out is None else out
    if is_traced() or compiler._is_compiling_flag:
        _bmm_fp8(made, A, B, A_scale, B_scale, None)
        return made
    if out is not None and A.is_cuda:
        refuse_shared_memory("bmm_fp8", out, A=A, B=B, A_scale=A_scale, B_scale=B_scale)
    if backend == "auto":
        launch = tuned_bmm_fp8(made, A, B, A_scale, B_scale, bmm_fp8.suitable_auto_backends)
        _launches.keep(launch, "auto", A, B, A_scale, B_scale, dtype, out, backend)
        return made
    capability = capability_of[A.get_device()]
    with_torch = prefers_torch_fp8(made, A, B) if capability else None
    _bmm_fp8(made, A, B, A_scale, B_scale, with_torch)
    launch = None
    if with_torch and not (capability == _HOPPER and has_few_rows(A, B, SMALL_FP8, LARGE_FP8)):
        launch = _launch_torch  # torch refuses layouts that it does not take
    elif not with_torch and capability == _HOPPER and (A.shape[0] > 1 or streams_fp8(A, B)):
        launch = _launch_own
    _launches.keep(launch, f"{with_torch=}", A, B, A_scale, B_scale, dtype, out, backend)
    return made
