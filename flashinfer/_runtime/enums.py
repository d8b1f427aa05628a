# SPDX-License-Identifier: Apache-2.0
"""Enums shared with the kernels (mask, position encoding, KV layout), plus ``log2e``, ALiBi slopes, indptr helpers."""

from __future__ import annotations

import enum
import math
from typing import Optional

import torch

__all__ = ["MaskMode", "PosEncodingMode", "TensorLayout", "get_alibi_slopes", "get_indptr", "log2e"]

log2e = math.log2(math.e)  # factor that converts natural to base-2 logarithms, the base of an LSE


class PosEncodingMode(enum.Enum):
    """Position encoding applied inside an attention kernel."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class MaskMode(enum.Enum):
    """Mask mode: the rule that decides which keys a query sees."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class TensorLayout(enum.Enum):
    """Order of the sequence (N), head (H) and head-dimension (D) axes."""

    NHD = 0
    HND = 1


def get_indptr(x: torch.Tensor) -> torch.Tensor:
    """Return the prefix sum of segment lengths, int64, on the same device: ``[3, 1]`` gives ``[0, 3, 4]``."""
    indptr = torch.zeros(x.shape[0] + 1, dtype=torch.int64, device=x.device)
    torch.cumsum(x, dim=0, out=indptr[1:])
    return indptr


def get_alibi_slopes(n_heads: int, device: Optional[torch.device] = None) -> torch.Tensor:
    """Return the ALiBi slope of each head, float32 ``(n_heads,)``.

    With ``m`` the largest power of two up to ``n_heads``: ``2^(-8 k / m)`` for ``k = 1..m``; heads beyond ``m`` get the
    odd terms of the sequence for ``2 m`` heads.
    """
    m = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * k / m) for k in range(1, m + 1)]
    slopes += [2 ** (-4 * (2 * k - 1) / m) for k in range(1, n_heads - m + 1)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)
