# SPDX-License-Identifier: Apache-2.0
"""RMSNorm: plain and Gemma, with the residual add before it and the fp8 conversion or SiLU after it."""

from __future__ import annotations

from typing import Optional, Union

import torch

from .._runtime.checks import check_tensors
from .._runtime.dispatch import NativeFunction, use_pdl
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_type_errors
from .._runtime.probes import probes
from .._runtime.torch_ops import register_custom_op
from ..api_logging import flashinfer_api
from ..trace.templates.norm import (
    fused_add_rmsnorm_quant_trace,
    fused_add_rmsnorm_trace,
    fused_rmsnorm_silu_trace,
    gemma_fused_add_rmsnorm_trace,
    gemma_rmsnorm_trace,
    rmsnorm_quant_trace,
    rmsnorm_trace,
)
from .modules import get_norm_module, scale_tensor

_native_rmsnorm = NativeFunction(get_norm_module, "rmsnorm")
_native_fused_add_rmsnorm = NativeFunction(get_norm_module, "fused_add_rmsnorm")
_native_rmsnorm_quant = NativeFunction(get_norm_module, "rmsnorm_quant")
_native_fused_add_rmsnorm_quant = NativeFunction(get_norm_module, "fused_add_rmsnorm_quant")
_native_rmsnorm_silu = NativeFunction(get_norm_module, "rmsnorm_silu")

# Destination-passing ops: torch.compile puts them into graphs, eager mode calls them directly.


@register_custom_op("flashinfer::rmsnorm", mutates_args=("out",))
def _rmsnorm(
    out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: Optional[bool]
) -> None:
    _native_rmsnorm[input.is_cuda](out, input, weight, eps, 0.0, use_pdl(input, enable_pdl))


@register_custom_op("flashinfer::gemma_rmsnorm", mutates_args=("out",))
def _gemma_rmsnorm(
    out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: Optional[bool]
) -> None:
    _native_rmsnorm[input.is_cuda](out, input, weight, eps, 1.0, use_pdl(input, enable_pdl))


@register_custom_op("flashinfer::fused_add_rmsnorm", mutates_args=("input", "residual"))
def _fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: Optional[bool]
) -> None:
    pdl = use_pdl(input, enable_pdl)
    _native_fused_add_rmsnorm[input.is_cuda](input, residual, weight, eps, 0.0, pdl)


@register_custom_op("flashinfer::gemma_fused_add_rmsnorm", mutates_args=("input", "residual"))
def _gemma_fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: Optional[bool]
) -> None:
    pdl = use_pdl(input, enable_pdl)
    _native_fused_add_rmsnorm[input.is_cuda](input, residual, weight, eps, 1.0, pdl)


@register_custom_op("flashinfer::rmsnorm_quant", mutates_args=("out",))
def _rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    enable_pdl: Optional[bool],
) -> None:
    pdl = use_pdl(input, enable_pdl)
    _native_rmsnorm_quant[input.is_cuda](out, input, weight, scale, eps, pdl)


@register_custom_op("flashinfer::fused_add_rmsnorm_quant", mutates_args=("out", "residual"))
def _fused_add_rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    enable_pdl: Optional[bool],
) -> None:
    pdl = use_pdl(input, enable_pdl)
    _native_fused_add_rmsnorm_quant[input.is_cuda](out, input, residual, weight, scale, eps, pdl)


@register_custom_op("flashinfer::fused_rmsnorm_silu", mutates_args=("out",))
def _fused_rmsnorm_silu(out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    _native_rmsnorm_silu[input.is_cuda](out, input, weight, eps)


# The public functions.


@flashinfer_api(trace=rmsnorm_trace)
def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: Optional[torch.Tensor] = None,
    enable_pdl: Optional[bool] = None,
) -> torch.Tensor:
    r"""Root mean square normalisation over the last dimension.

    ``out[i] = input[i] / sqrt(mean(input ** 2) + eps) * weight[i]``, in float32, rounded once.

    Parameters
    ----------
    input : torch.Tensor
        ``(batch, hidden)``, or ``(batch, heads, head_dim)`` for per-head norms; float16, bfloat16 or float32. The last
        dimension is contiguous, the others have any stride.
    weight : torch.Tensor
        ``(hidden,)`` or ``(head_dim,)``, dtype of ``input``.
    eps : float
        Added to the mean square.
    out : Optional[torch.Tensor]
        Written and returned when given; may be ``input`` itself.
    enable_pdl : Optional[bool]
        Programmatic dependent launch; None turns it on where the GPU has it (compute capability 9.0 on).

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``input``. An empty batch gives an empty tensor.

    Examples
    --------
    >>> x, w = torch.randn(2, 4096), torch.ones(4096)
    >>> y = flashinfer.rmsnorm(x, w)
    """
    if out is None:
        try:
            out = torch.empty_like(input)
        except TypeError:
            check_tensors("rmsnorm", input=input)
            raise
    _rmsnorm(out, input, weight, eps, enable_pdl)
    return out


@flashinfer_api(trace=gemma_rmsnorm_trace)
def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: Optional[torch.Tensor] = None,
    enable_pdl: Optional[bool] = None,
) -> torch.Tensor:
    r"""RMSNorm as Gemma has it: the weight counts from one.

    ``out[i] = input[i] / sqrt(mean(input ** 2) + eps) * (1 + weight[i])``. Everything else as in :func:`rmsnorm`.

    Examples
    --------
    >>> x, w = torch.randn(2, 64), torch.zeros(64)
    >>> y = flashinfer.gemma_rmsnorm(x, w)  # a weight of 0 is a factor of 1
    """
    if out is None:
        try:
            out = torch.empty_like(input)
        except TypeError:
            check_tensors("gemma_rmsnorm", input=input)
            raise
    _gemma_rmsnorm(out, input, weight, eps, enable_pdl)
    return out


@flashinfer_api(trace=fused_add_rmsnorm_trace)
def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: Optional[bool] = None,
) -> None:
    r"""Add the residual, then RMSNorm; both in place.

    ``s = input + residual`` in float32; ``residual`` becomes ``s`` rounded, ``input`` becomes
    ``s / sqrt(mean(s ** 2) + eps) * weight`` computed from the unrounded ``s``.

    Parameters
    ----------
    input : torch.Tensor
        As in :func:`rmsnorm`. Overwritten with the normalised sum.
    residual : torch.Tensor
        Shape and dtype of ``input``, its own strides. Overwritten with the sum.
    weight : torch.Tensor
        ``(hidden,)``.
    eps : float
        Added to the mean square.
    enable_pdl : Optional[bool]
        As in :func:`rmsnorm`.

    Examples
    --------
    >>> x, residual, w = torch.ones(2, 64), torch.ones(2, 64), torch.ones(64)
    >>> flashinfer.fused_add_rmsnorm(x, residual, w)
    >>> residual[0, 0].item(), round(x[0, 0].item(), 4)
    (2.0, 1.0)
    """
    _fused_add_rmsnorm(input, residual, weight, eps, enable_pdl)


@flashinfer_api(trace=gemma_fused_add_rmsnorm_trace)
def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: Optional[bool] = None,
) -> None:
    r""":func:`fused_add_rmsnorm` with Gemma's weight, ``1 + weight``.

    Examples
    --------
    >>> x, residual, w = torch.ones(2, 64), torch.ones(2, 64), torch.zeros(64)
    >>> flashinfer.gemma_fused_add_rmsnorm(x, residual, w)
    >>> residual[0, 0].item(), round(x[0, 0].item(), 4)
    (2.0, 1.0)
    """
    _gemma_fused_add_rmsnorm(input, residual, weight, eps, enable_pdl)


@flashinfer_api(trace=rmsnorm_quant_trace)
def rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: Union[torch.Tensor, float],
    eps: float = 1e-6,
    enable_pdl: Optional[bool] = None,
) -> None:
    r"""RMSNorm with fp8 output: the float32 result times ``1 / scale``, saturated, rounded to nearest even.

    Parameters
    ----------
    out : torch.Tensor
        Shape of ``input``; float8_e4m3fn (saturates at 448) or float8_e5m2 (57344).
    input, weight, eps, enable_pdl
        As in :func:`rmsnorm`.
    scale : torch.Tensor
        One float32 element, on the input's device (moved there otherwise). A float is accepted with a FutureWarning.

    Examples
    --------
    >>> x, w = torch.randn(2, 64).bfloat16(), torch.ones(64).bfloat16()
    >>> out = torch.empty(2, 64, dtype=torch.float8_e4m3fn)
    >>> flashinfer.norm.rmsnorm_quant(out, x, w, torch.tensor([0.5]))
    """
    _rmsnorm_quant(out, input, weight, scale_tensor("rmsnorm_quant", scale, input), eps, enable_pdl)


@flashinfer_api(trace=fused_add_rmsnorm_quant_trace)
def fused_add_rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: Union[torch.Tensor, float],
    eps: float = 1e-6,
    enable_pdl: Optional[bool] = None,
) -> None:
    r"""Add the residual (in place), RMSNorm, fp8 output. ``input`` is left as it was; see :func:`rmsnorm_quant`.

    Examples
    --------
    >>> x, w = torch.randn(2, 64).bfloat16(), torch.ones(64).bfloat16()
    >>> out, residual = torch.empty(2, 64, dtype=torch.float8_e4m3fn), torch.zeros_like(x)
    >>> flashinfer.norm.fused_add_rmsnorm_quant(out, x, residual, w, torch.tensor([0.5]))
    >>> torch.equal(residual, x)
    True
    """
    scale = scale_tensor("fused_add_rmsnorm_quant", scale, input)
    _fused_add_rmsnorm_quant(out, input, residual, weight, scale, eps, enable_pdl)


_SILU_OUT_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)


def _check_silu(input: torch.Tensor, weight: torch.Tensor, out: Optional[torch.Tensor]) -> None:
    op = "fused_rmsnorm_silu"
    if not input.is_cuda:
        raise ArgumentError(f"{op}: input must be on a CUDA device, got {input.device}")
    if input.ndim != 2 or input.dtype != torch.bfloat16:
        raise ArgumentError(f"{op}: input must be 2-D torch.bfloat16, got {input.ndim}-D {input.dtype}")
    if weight.ndim != 1 or weight.dtype != torch.bfloat16 or weight.shape[0] != input.shape[1]:
        raise ArgumentError(
            f"{op}: weight must have shape ({input.shape[1]},) and dtype torch.bfloat16, got {tuple(weight.shape)} and "
            f"{weight.dtype}"
        )
    if out is None:
        return
    major, minor = probes.get_compute_capability(input.device)
    if out.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        raise RuntimeError(f"{op}: float4_e2m1fn_x2 output needs an SM100 kernel, this is SM{major}{minor}")
    if out.dtype not in _SILU_OUT_DTYPES:
        raise ArgumentError(f"{op}: out must have dtype torch.bfloat16 or torch.float8_e4m3fn, got {out.dtype}")
    if out.dtype == torch.float8_e4m3fn and major * 10 + minor < 89:
        raise RuntimeError(f"{op}: float8_e4m3fn output needs SM89, this is SM{major}{minor}")
    if out.shape != input.shape:
        raise ArgumentError(f"{op}: out must have shape {tuple(input.shape)}, got {tuple(out.shape)}")


@flashinfer_api(trace=fused_rmsnorm_silu_trace)
@explain_type_errors
def fused_rmsnorm_silu(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: Optional[torch.Tensor] = None,
    block_scale: Optional[torch.Tensor] = None,
) -> Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    r"""SiLU of the RMSNorm, ``y * sigmoid(y)`` with ``y = rmsnorm(input, weight)``. CUDA only.

    Parameters
    ----------
    input : torch.Tensor
        ``(batch, hidden)`` bfloat16 on a CUDA device.
    weight : torch.Tensor
        ``(hidden,)`` bfloat16.
    eps : float
        Added to the mean square.
    out : Optional[torch.Tensor]
        Shape of ``input``; its dtype chooses the format: bfloat16 (default), or float8_e4m3fn, a plain saturating cast
        (compute capability 8.9 on).
    block_scale : Optional[torch.Tensor]
        Only for 4-bit output, which no GPU before SM100 has.

    Returns
    -------
    torch.Tensor
        ``out``.
    """
    _check_silu(input, weight, out)
    if out is None:
        out = torch.empty_like(input)
    if block_scale is not None:
        raise ArgumentError(f"fused_rmsnorm_silu: block_scale must be None (out has dtype {out.dtype}), got a value")
    _fused_rmsnorm_silu(out, input, weight, eps)
    return out
