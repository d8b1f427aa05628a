# SPDX-License-Identifier: Apache-2.0
"""The batched bf16 product of the backend "cutile". It needs no package ``cuda.tile``: our kernels compute it."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ...bf16 import bmm_bf16

__all__ = ["bmm_bf16_cutile", "make_bmm_bf16_tune_cache"]


def bmm_bf16_cutile(
    A: torch.Tensor, B: torch.Tensor, out: Optional[torch.Tensor] = None, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Multiply batches: :func:`flashinfer.bmm_bf16` with the backend "cutile"."""
    return bmm_bf16(A, B, out, out_dtype, backend="cutile")


def make_bmm_bf16_tune_cache() -> dict[Any, Any]:
    """Return an empty cache of tile sizes by shape. Our kernels choose tiles by a rule and leave the cache empty."""
    return {}
