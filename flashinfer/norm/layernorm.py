# SPDX-License-Identifier: Apache-2.0
"""LayerNorm of bfloat16 rows with float32 parameters, plain and with fp8 output."""

from __future__ import annotations

from typing import Union

import torch

from .._runtime.dispatch import backend_of
from .._runtime.torch_ops import register_custom_op, register_fake_op
from ..api_logging import flashinfer_api
from ..trace.templates.norm import layernorm_quant_trace, layernorm_trace
from .modules import get_norm_module, scale_tensor


@register_custom_op("flashinfer::layernorm", mutates_args=())
def _layernorm(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(input)
    get_norm_module(backend_of(input)).layernorm(out, input, gemma, beta, eps)
    return out


@register_fake_op("flashinfer::layernorm")
def _layernorm_fake(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(input)


@register_custom_op("flashinfer::layernorm_quant", mutates_args=("out",))
def _layernorm_quant(
    out: torch.Tensor, input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, scale: torch.Tensor, eps: float
) -> None:
    get_norm_module(backend_of(input)).layernorm_quant(out, input, gemma, beta, scale, eps)


@flashinfer_api(trace=layernorm_trace)
def layernorm(input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    r"""Layer normalisation over the last dimension.

    ``out = (input - mean) / sqrt(var + eps) * gemma + beta`` with the biased variance, in float32, rounded once.

    Parameters
    ----------
    input : torch.Tensor
        ``(batch, hidden)`` bfloat16, contiguous.
    gemma : torch.Tensor
        Gain, ``(hidden,)`` float32. (The published name of the parameter; it is the usual gamma.)
    beta : torch.Tensor
        Offset, ``(hidden,)`` float32.
    eps : float
        Added to the variance.

    Returns
    -------
    torch.Tensor
        ``(batch, hidden)`` bfloat16.

    Examples
    --------
    >>> x = torch.randn(2, 64).bfloat16()
    >>> y = flashinfer.layernorm(x, torch.ones(64), torch.zeros(64))
    """
    return _layernorm(input, gemma, beta, eps)


@flashinfer_api(trace=layernorm_quant_trace)
def layernorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    scale: Union[torch.Tensor, float],
    eps: float = 1e-6,
) -> None:
    r"""LayerNorm with fp8 output: the bfloat16-rounded result times ``1 / scale``, saturated, rounded to nearest even.

    Parameters
    ----------
    out : torch.Tensor
        Shape of ``input``; float8_e4m3fn or float8_e5m2.
    input, gemma, beta, eps
        As in :func:`layernorm`.
    scale : torch.Tensor
        One float32 element. A float is accepted with a FutureWarning.

    Examples
    --------
    >>> x, out = torch.randn(2, 64).bfloat16(), torch.empty(2, 64, dtype=torch.float8_e4m3fn)
    >>> flashinfer.norm.layernorm_quant(out, x, torch.ones(64), torch.zeros(64), torch.tensor([0.5]))
    """
    _layernorm_quant(out, input, gemma, beta, scale_tensor("layernorm_quant", scale, input), eps)
