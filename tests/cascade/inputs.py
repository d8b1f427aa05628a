# SPDX-License-Identifier: Apache-2.0
"""States to merge, and the ways they may lie in memory."""

from __future__ import annotations

import torch

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def states(*shape: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """v of ``shape`` and its scores, wide enough apart that some states hardly count."""
    return torch.randn(shape, device=device).to(dtype), 4 * torch.randn(shape[:-1], device=device)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """The same values, rows and heads swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)
