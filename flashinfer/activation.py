# SPDX-License-Identifier: Apache-2.0
"""Gated activations: an activation of one tensor (or half of one) times another, in one pass over memory."""

from __future__ import annotations

from typing import Optional

import torch

from ._compat.unsupported_quantization import (
    silu_and_mul_scaled_nvfp4_experts_quantize as silu_and_mul_scaled_nvfp4_experts_quantize,
)
from ._runtime.allocation import new_empty
from ._runtime.checks import check_tensors
from ._runtime.dispatch import NativeFunction, use_pdl
from ._runtime.errors import ArgumentError
from ._runtime.torch_ops import register_custom_op
from .api_logging import flashinfer_api
from .jit.activation import gen_act_and_mul_module as gen_act_and_mul_module
from .jit.activation import gen_activation_module
from .jit.codegen import module_cache
from .trace.templates.activation import (
    gelu_and_mul_trace,
    gelu_tanh_and_mul_trace,
    silu_and_mul_trace,
    swiglu_trace,
)

__all__ = ["gelu_and_mul", "gelu_tanh_and_mul", "silu_and_mul", "swiglu"]

get_act_and_mul_module = module_cache(gen_act_and_mul_module)
_get_module = module_cache(gen_activation_module)

_native_silu_and_mul = NativeFunction(_get_module, "silu_and_mul")
_native_gelu_and_mul = NativeFunction(_get_module, "gelu_and_mul")
_native_gelu_tanh_and_mul = NativeFunction(_get_module, "gelu_tanh_and_mul")
_native_swiglu = NativeFunction(_get_module, "swiglu")


def _half_of(op: str, input: torch.Tensor) -> torch.Tensor:
    """Allocate the result of ``op``: the shape of ``input`` with half the last dimension."""
    try:
        shape = input.shape
        if not shape:
            raise ArgumentError(f"{op}: input must have at least 1 dimension, got 0")
        *leading, width = shape
        return new_empty(input, input.dtype, *leading, width // 2)
    except AttributeError:
        check_tensors(op, input=input)
        raise


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """View ``x`` as the rows that kernels take (last stride 1, one row stride); copy if there is no such view."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.shape[-1] <= 1 or rows.stride(-1) == 1 else rows.contiguous()


# Destination-passing ops: torch.compile puts them into graphs, eager mode calls them directly.


@register_custom_op("flashinfer::silu_and_mul", mutates_args=("out",))
def _silu_and_mul(out: torch.Tensor, input: torch.Tensor, enable_pdl: Optional[bool]) -> None:
    _native_silu_and_mul[input.is_cuda](out, input, use_pdl(input, enable_pdl))


@register_custom_op("flashinfer::gelu_and_mul", mutates_args=("out",))
def _gelu_and_mul(out: torch.Tensor, input: torch.Tensor, enable_pdl: Optional[bool]) -> None:
    _native_gelu_and_mul[input.is_cuda](out, input, use_pdl(input, enable_pdl))


@register_custom_op("flashinfer::gelu_tanh_and_mul", mutates_args=("out",))
def _gelu_tanh_and_mul(out: torch.Tensor, input: torch.Tensor, enable_pdl: Optional[bool]) -> None:
    _native_gelu_tanh_and_mul[input.is_cuda](out, input, use_pdl(input, enable_pdl))


@register_custom_op("flashinfer::swiglu", mutates_args=("out",))
def _swiglu(out: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> None:
    if not (x.is_contiguous() and gate.is_contiguous() and out.is_contiguous()) and x.shape == gate.shape == out.shape:
        rows = out.reshape(-1, out.shape[-1])
        if rows.data_ptr() != out.data_ptr():
            raise ArgumentError(f"swiglu: out must have rows at one distance, got strides {out.stride()}")
        out, x, gate = rows, _as_rows(x), _as_rows(gate)
    _native_swiglu[x.is_cuda](out, x, gate)


# The public functions.


@flashinfer_api(trace=silu_and_mul_trace)
def silu_and_mul(
    input: torch.Tensor, out: Optional[torch.Tensor] = None, enable_pdl: Optional[bool] = None
) -> torch.Tensor:
    r"""SiLU of the first half of each row times the second half.

    ``out[..., j] = silu(input[..., j]) * input[..., d + j]`` with ``silu(x) = x / (1 + exp(-x))``, in float32, the
    product rounded once.

    Parameters
    ----------
    input : torch.Tensor
        ``(..., 2 * d)``, float16, bfloat16 or float32, contiguous (or rows at one distance). A row has a multiple of 16
        bytes.
    out : Optional[torch.Tensor]
        ``(..., d)``, dtype of ``input``; written and returned when given.
    enable_pdl : Optional[bool]
        Programmatic dependent launch; None turns it on where the GPU has it (compute capability 9.0 on).

    Returns
    -------
    torch.Tensor
        ``(..., d)``, dtype of ``input``. An empty input gives an empty tensor.

    Examples
    --------
    >>> y = flashinfer.silu_and_mul(torch.randn(2, 2 * 14336, dtype=torch.bfloat16))
    """
    if out is None:
        out = _half_of("silu_and_mul", input)
    _silu_and_mul(out, input, enable_pdl)
    return out


@flashinfer_api(trace=gelu_and_mul_trace)
def gelu_and_mul(
    input: torch.Tensor, out: Optional[torch.Tensor] = None, enable_pdl: Optional[bool] = None
) -> torch.Tensor:
    r"""GELU of the first half of each row times the second half: ``gelu(x) = 0.5 x (1 + erf(x / sqrt(2)))``.

    Everything else as in :func:`silu_and_mul`.

    Examples
    --------
    >>> x = torch.randn(2, 64)
    >>> flashinfer.gelu_and_mul(x).shape
    torch.Size([2, 32])
    """
    if out is None:
        out = _half_of("gelu_and_mul", input)
    _gelu_and_mul(out, input, enable_pdl)
    return out


@flashinfer_api(trace=gelu_tanh_and_mul_trace)
def gelu_tanh_and_mul(
    input: torch.Tensor, out: Optional[torch.Tensor] = None, enable_pdl: Optional[bool] = None
) -> torch.Tensor:
    r"""Tanh-approximated GELU of the first half of each row times the second half.

    ``gelu_tanh(x) = 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``. Everything else as in :func:`silu_and_mul`.

    Examples
    --------
    >>> x = torch.randn(2, 64)
    >>> flashinfer.gelu_tanh_and_mul(x).shape
    torch.Size([2, 32])
    """
    if out is None:
        out = _half_of("gelu_tanh_and_mul", input)
    _gelu_tanh_and_mul(out, input, enable_pdl)
    return out


@flashinfer_api(trace=swiglu_trace)
def swiglu(x: torch.Tensor, gate: torch.Tensor, out: Optional[torch.Tensor] = None) -> torch.Tensor:
    r"""``x * sigmoid(gate)``, elementwise, in float32, rounded once.

    Parameters
    ----------
    x : torch.Tensor
        Any shape; float16, bfloat16 or float32. Taken as it lies when contiguous or a slice of columns, such as half of
        a packed projection; copied first otherwise.
    gate : torch.Tensor
        Shape, dtype and device of ``x``, its own strides.
    out : Optional[torch.Tensor]
        As ``x``; written and returned when given. May be ``x`` or ``gate``.

    Returns
    -------
    torch.Tensor
        Shape and dtype of ``x``, contiguous unless ``out`` is given.

    Examples
    --------
    >>> y = flashinfer.swiglu(torch.randn(7, 13, 17), torch.randn(7, 13, 17))
    """
    if out is None:
        try:
            out = new_empty(x, x.dtype, *x.shape)
        except AttributeError:
            check_tensors("swiglu", x=x)
            raise
    _swiglu(out, x, gate)
    return out
