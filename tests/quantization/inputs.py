# SPDX-License-Identifier: Apache-2.0
"""Inputs that the quantization tests share."""

from __future__ import annotations

import torch

from flashinfer.quantization import SfLayout

LAYOUTS = list(SfLayout)


def random_bytes(*shape: int, device: str, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, device=device)


def e4m3_scales(*shape: int, device: str) -> torch.Tensor:
    """Return every scale but NaN, 0x7F and 0xFF; block scales are not negative."""
    return random_bytes(*shape, device=device, high=127).view(torch.float8_e4m3fn)


def unaligned(x: torch.Tensor, offset: int = 1) -> torch.Tensor:
    """Return the same values, contiguous, at an address without vector alignment."""
    room = torch.empty(x.numel() + offset, dtype=x.dtype, device=x.device)
    view = room[offset:].view(x.shape)
    view.copy_(x)
    return view


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether two tensors on any devices are equal to the last bit, NaN included."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    return torch.equal(actual.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))
