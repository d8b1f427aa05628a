# SPDX-License-Identifier: Apache-2.0
"""A gated activation with scales, under the module path of its published Triton version."""

from __future__ import annotations

from typing import Optional

import torch

from flashinfer import activation
from flashinfer._runtime.errors import ArgumentError

__all__ = ["scaled_to", "silu_and_mul"]


def scaled_to(x: torch.Tensor, scale: Optional[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Multiply by a scale, if any, and convert with saturation: types of 8 bits have no infinity to overflow to."""
    x = x if scale is None else x * scale
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return x.clamp(limits.min, limits.max).to(dtype)


def silu_and_mul(
    x: torch.Tensor,
    x_scale: Optional[torch.Tensor] = None,
    o_scale: Optional[torch.Tensor] = None,
    dtype: Optional[torch.dtype] = None,
) -> torch.Tensor:
    """Return ``silu(gate) * up * o_scale`` of the halves of ``x * x_scale``, in ``dtype`` (that of ``x`` if None).

    Parameters
    ----------
    x : torch.Tensor
        ``(rows, 2 * hidden)``: gate, then up.
    x_scale, o_scale : Optional[torch.Tensor]
        Scales of one element.
    dtype : Optional[torch.dtype]
        dtype of the result, which saturates.
    """
    if x.ndim != 2 or x.shape[1] % 2:
        raise ArgumentError(f"silu_and_mul: x must have shape (rows, 2 * hidden), got {tuple(x.shape)}")
    dtype = x.dtype if dtype is None else dtype
    if x_scale is None and o_scale is None and dtype == x.dtype:
        return activation.silu_and_mul(x)
    gate, up = (x.float() if x_scale is None else x.float() * x_scale).chunk(2, dim=1)
    return scaled_to(torch.nn.functional.silu(gate) * up, o_scale, dtype)
