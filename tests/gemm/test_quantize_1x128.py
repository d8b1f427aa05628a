# SPDX-License-Identifier: Apache-2.0
"""The 1 x 128 quantiser of activations against its formula, bit by bit."""

from __future__ import annotations

import pytest
import torch

from flashinfer._runtime.errors import ArgumentError
from flashinfer.jit.gemm import get_quantize_1x128_module

E4M3 = torch.float8_e4m3fn


def formula(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.float().unflatten(1, (-1, 128))
    amax = blocks.abs().amax(-1)
    q = torch.where(amax == 0, 1.0, torch.full_like(amax, 448.0) / amax)  # 448.0 / amax would round twice
    return (blocks * q[..., None]).clamp(-448, 448).to(E4M3).flatten(1), (1 / q).T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, columns", [(0, 128), (1, 128), (7, 1152), (130, 640)])
def test_codes_and_scales(device, dtype, rows, columns):
    """Check blocks of zeros, rows that lie apart, and padded scales, whose padding is left alone."""
    x = torch.randn(rows, columns + 8, device=device).to(dtype)[:, :columns] * 3
    x[:, :128] *= (torch.arange(rows, device=device) % 3 != 1).to(dtype)[:, None]
    codes = torch.ones(rows, columns, device=device).to(E4M3)
    padded = torch.full((columns // 128, -(-rows // 4) * 4), torch.nan, device=device)
    get_quantize_1x128_module(device).quantize_1x128(codes, padded[:, :rows], x, False)
    expected, scales = formula(x)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(padded[:, :rows], scales)
    assert padded[:, rows:].isnan().all()


def test_columns_must_be_whole_blocks(device):
    x, codes = torch.ones(2, 96, device=device).bfloat16(), torch.ones(2, 96, device=device).to(E4M3)
    with pytest.raises(ArgumentError, match="divisible by block size 128, got 96"):
        get_quantize_1x128_module(device).quantize_1x128(codes, torch.ones(1, 2, device=device), x, False)
