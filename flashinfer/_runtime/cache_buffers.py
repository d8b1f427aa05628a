# SPDX-License-Identifier: Apache-2.0
"""Scratch memory that outlives a call: one buffer per name and device, which grows and is never freed."""

from __future__ import annotations

import functools
from typing import Union

import torch

__all__ = ["_cache_buf", "_get_cache_buf", "_get_range_buf"]

_cache_buf: dict[tuple[str, torch.device], torch.Tensor] = {}


def _get_cache_buf(name: str, bytes: int, device: torch.device, zero_init: bool = False) -> torch.Tensor:
    """Return the uint8 buffer ``name`` of at least ``bytes`` bytes; a new one (zeroed, if asked) only to grow."""
    key = (name, device)
    buffer = _cache_buf.get(key)
    if buffer is None or buffer.numel() < bytes:
        allocate = torch.zeros if zero_init else torch.empty
        buffer = _cache_buf[key] = allocate(bytes, dtype=torch.uint8, device=device)
    return buffer


@functools.cache
def _get_range_buf(n: int, device: Union[str, torch.device]) -> torch.Tensor:
    """Return ``0 .. n - 1`` as int32; the same tensor for the same size and device, not to be written."""
    return torch.arange(n, dtype=torch.int32, device=device)
