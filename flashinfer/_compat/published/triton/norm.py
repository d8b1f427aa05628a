# SPDX-License-Identifier: Apache-2.0
"""RMS norms with scales, under the module path of their published Triton versions."""

from __future__ import annotations

from typing import Optional

import torch

from flashinfer._compat.published.triton.activation import scaled_to
from flashinfer.norm import rmsnorm

__all__ = ["rms_norm", "rms_norm_add_residual"]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    in_scale: Optional[torch.Tensor] = None,
    out_scale: Optional[torch.Tensor] = None,
) -> None:
    """Write ``rmsnorm(x * in_scale) * weight * out_scale`` to ``out``, clamped to what its dtype holds."""
    if in_scale is None and out_scale is None and out.dtype == x.dtype == weight.dtype:
        rmsnorm(x, weight, eps, out)
        return
    values = x.float() if in_scale is None else x.float() * in_scale
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float()
    out.copy_(scaled_to(normed, out_scale, out.dtype))


def rms_norm_add_residual(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    x_out: Optional[torch.Tensor] = None,
    x_in_scale: Optional[torch.Tensor] = None,
    x_out_scale: Optional[torch.Tensor] = None,
) -> None:
    """Add ``x * x_in_scale`` to ``residual`` in place, and write the norm of the sum to ``x_out``, or to ``x``."""
    values = x.float() if x_in_scale is None else x.float() * x_in_scale
    total = values + residual.float()
    residual.copy_(total)
    target = x if x_out is None else x_out
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight.float()
    target.copy_(scaled_to(normed, x_out_scale, target.dtype))
