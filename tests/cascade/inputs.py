# SPDX-License-Identifier: Apache-2.0
"""States to merge, in several memory layouts."""

from __future__ import annotations

import torch

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def states(*shape: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return v of ``shape`` and its scores, far enough apart that some states have almost no weight."""
    return torch.randn(shape, device=device).to(dtype), 4 * torch.randn(shape[:-1], device=device)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """Return the same values with rows and heads swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)
