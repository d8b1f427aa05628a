# SPDX-License-Identifier: Apache-2.0
"""Tensors for tests of several families."""

from __future__ import annotations

import torch


def randn(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def view_of_wider(x: torch.Tensor, pad: int = 3, offset: int = 1, gap: float = 7.0) -> torch.Tensor:
    """Return the same values as columns of a wider buffer. The odd defaults align no row to more than an element.

    The columns around hold ``gap``: infinity is what no reduction may see.
    """
    wide = torch.full((*x.shape[:-1], x.shape[-1] + pad), gap, device=x.device).to(x.dtype)
    view = wide[..., offset : offset + x.shape[-1]]
    view.copy_(x)
    return view


def gaps_are_untouched(view: torch.Tensor) -> bool:
    """Return True if the columns around a ``view_of_wider`` still hold the sevens that were put there."""
    wide = view._base
    return int((wide.float() == 7.0).sum()) >= wide.numel() - view.numel()
