# SPDX-License-Identifier: Apache-2.0
"""``flashinfer.shift``: values, buffers and errors."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.testing import assert_close
from flashinfer.trace.templates.shift import shift_trace


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 67), (64, 4100)], ids=str)  # empty, one, a tail, several threads
def test_values(device, dtype, shape):
    x = torch.randn(shape, device=device).to(dtype)
    assert_close(flashinfer.shift(x, 0.75), shift_trace.reference(x, 0.75))


def test_unaligned(device):
    """Check an input that no vector load may read."""
    x = torch.randn(101, device=device)[1:].view(10, 10)
    assert_close(flashinfer.shift(x, -2.0), shift_trace.reference(x, -2.0))


def test_in_place(device):
    x = torch.randn(5, 33, device=device)
    expected = shift_trace.reference(x, 1.5)
    assert flashinfer.shift(x, 1.5, out=x) is x
    assert_close(x, expected)


def test_errors(device):
    x = torch.ones(4, 6, device=device)
    with pytest.raises(ValueError, match=r"shift: input.*contiguous"):
        flashinfer.shift(x.t(), 1.0)
    with pytest.raises(ValueError, match="shift: out"):
        flashinfer.shift(x, 1.0, out=x[1:])
    with pytest.raises(ValueError, match="shift: input"):
        flashinfer.shift(x.double(), 1.0)
