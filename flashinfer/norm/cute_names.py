# SPDX-License-Identifier: Apache-2.0
"""Names of norm kernels that published releases write in another language, for engines that call them directly."""

from __future__ import annotations

import torch

from .._runtime.errors import ArgumentError
from .rmsnorm import gemma_rmsnorm, rmsnorm

__all__ = ["qk_rmsnorm_cute"]


def qk_rmsnorm_cute(
    input: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    enable_pdl: bool = False,
) -> None:
    """Normalise each head of ``input`` into ``output``, with weights ``weight + weight_bias``.

    Parameters
    ----------
    input, output : torch.Tensor
        ``(batch, heads, head_dim)``; ``output`` may be ``input``.
    weight : torch.Tensor
        ``(head_dim,)``.
    weight_bias : float
        0, or 1 as Gemma has it.
    """
    if weight_bias not in (0.0, 1.0):
        raise ArgumentError(f"qk_rmsnorm_cute: weight_bias must be 0 or 1, got {weight_bias}")
    normalise = gemma_rmsnorm if weight_bias else rmsnorm
    normalise(input, weight, eps, output, enable_pdl)
