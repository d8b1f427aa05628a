# SPDX-License-Identifier: Apache-2.0
"""The 1 x 128 quantiser of activations against its formula, bit by bit. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from flashinfer.jit.gemm import get_quantize_1x128_module

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, columns", [(0, 128), (1, 128), (7, 1152), (130, 4096)])
def test_quantize(dtype, rows, columns):
    """Check rows that do not fill a block of scales, blocks of zeros, columns that end inside a block of threads."""
    x = torch.randn(rows, columns, device="cuda").to(dtype) * 3
    x[:, :128] *= (torch.arange(rows, device="cuda") % 3 != 1).to(dtype)[:, None]
    codes = torch.full((rows, columns), 1.0, device="cuda").to(E4M3)
    padded = torch.full((columns // 128, -(-rows // 4) * 4), torch.nan, device="cuda")
    scales = padded[:, :rows]
    get_quantize_1x128_module().quantize_1x128(codes, scales, x, False)
    blocks = x.float().view(rows, columns // 128, 128)
    amax = blocks.abs().amax(-1)
    q = torch.where(amax == 0, 1.0, torch.full_like(amax, 448.0) / amax)  # 448.0 / amax would round twice
    expected = (blocks * q[..., None]).clamp(-448, 448).to(E4M3).view(rows, columns)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, (1 / q).T)
    assert padded[:, rows:].isnan().all()
