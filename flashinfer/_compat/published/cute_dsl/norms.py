# SPDX-License-Identifier: Apache-2.0
"""Norms under the names of their published versions in the CuTe DSL; ours are the native ones.

``weight_bias`` is added to the weight: 1 is the form of Gemma. ``enable_pdl`` is passed on.
"""

from __future__ import annotations

from typing import Union

import torch

from flashinfer import norm

__all__ = [
    "fused_add_rmsnorm_cute",
    "fused_add_rmsnorm_quant_cute",
    "layernorm_cute",
    "qk_rmsnorm_cute",
    "rmsnorm_cute",
    "rmsnorm_quant_cute",
]

Scale = Union[torch.Tensor, float]


def _shifted(weight: torch.Tensor, weight_bias: float) -> torch.Tensor:
    return weight if weight_bias == 0.0 else weight + weight_bias


def rmsnorm_cute(
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    enable_pdl: bool = False,
) -> None:
    """Write ``rmsnorm(input) * (weight + weight_bias)`` to ``out``."""
    if weight_bias == 1.0:
        norm.gemma_rmsnorm(input, weight, eps, out, enable_pdl)
    else:
        norm.rmsnorm(input, _shifted(weight, weight_bias), eps, out, enable_pdl)


def qk_rmsnorm_cute(
    input: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    enable_pdl: bool = False,
) -> None:
    """Write the norm of each head of ``(tokens, heads, head_dim)`` to ``output``."""
    rmsnorm_cute(input, weight, output, eps, weight_bias, enable_pdl)


def rmsnorm_quant_cute(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: Scale,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    enable_pdl: bool = False,
) -> None:
    """Write ``rmsnorm(input) * (weight + weight_bias) / scale`` in 8 bits to ``out``."""
    norm.rmsnorm_quant(out, input, _shifted(weight, weight_bias), scale, eps, enable_pdl)


def fused_add_rmsnorm_cute(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    enable_pdl: bool = False,
) -> None:
    """Add ``input`` to ``residual``, and write the norm of the sum to ``input``."""
    if weight_bias == 1.0:
        norm.gemma_fused_add_rmsnorm(input, residual, weight, eps, enable_pdl)
    else:
        norm.fused_add_rmsnorm(input, residual, _shifted(weight, weight_bias), eps, enable_pdl)


def fused_add_rmsnorm_quant_cute(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: Scale,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    enable_pdl: bool = False,
) -> None:
    """Add ``input`` to ``residual``, and write the norm of the sum, divided by ``scale``, in 8 bits to ``out``."""
    norm.fused_add_rmsnorm_quant(out, input, residual, _shifted(weight, weight_bias), scale, eps, enable_pdl)


def layernorm_cute(
    out: torch.Tensor,
    input: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool = False,
) -> None:
    """Write ``layernorm(input)`` to ``out``."""
    out.copy_(norm.layernorm(input, gamma, beta, eps))
