# SPDX-License-Identifier: Apache-2.0
"""Parts of the references and the init functions of rotary embeddings: the rotation, frequencies, a table."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["cos_sin_table", "frequencies", "rotate"]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleave: bool) -> torch.Tensor:
    """Turn the pairs of the last dimension, fp32; cos and sin are (tokens, pairs), and the columns beyond are kept."""
    x, tail = x.float().split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    cos, sin = (t.float().view(t.shape[0], *(1,) * (x.ndim - 2), t.shape[1]) for t in (cos, sin))
    first, second = (x[..., 0::2], x[..., 1::2]) if interleave else x.chunk(2, dim=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleave else torch.cat(pair, dim=-1)
    return torch.cat([turned, tail], dim=-1)


def frequencies(rotary_dim: int, rope_scale: float, rope_theta: float) -> torch.Tensor:
    """Return the angle of each pair per position, fp64."""
    return rope_theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim) / rope_scale


def cos_sin_table(max_seq_len: int, rotary_dim: int, device: Any) -> torch.Tensor:
    """Rows of cosines, then sines, of each position."""
    angle = torch.arange(max_seq_len)[:, None] * frequencies(rotary_dim, 1.0, 1e4)
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float().to(device)
