# SPDX-License-Identifier: Apache-2.0
"""The residual RMSNorm that quantises by blocks: values, strides, blocks of zeros, refusals."""

from __future__ import annotations

import pytest
import torch

from flashinfer.norm import fused_add_rmsnorm_fp8_block_quant
from flashinfer.trace.templates.norm_block_quant import fused_add_rmsnorm_fp8_block_quant_trace

E4M3 = torch.float8_e4m3fn


def arguments(rows: int, hidden: int, device: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {
        "out": torch.zeros(rows, hidden, dtype=E4M3, device=device),
        "block_scale": torch.full((hidden // 128, (rows + 3) // 4 * 4), -1.0, device=device),
        "normed_out": torch.empty(rows, hidden, dtype=dtype, device=device),
        "input": torch.randn(rows, hidden, device=device).to(dtype),
        "residual": torch.randn(rows, hidden, device=device).to(dtype),
        "weight": torch.randn(hidden, device=device).to(dtype),
    }


# One block of threads is not full; one vector per thread; two; four, the most.
@pytest.mark.parametrize("rows, hidden", [(0, 256), (3, 256), (5, 1792), (1, 7168), (2, 16384)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values(device, rows, hidden, dtype):
    kw = arguments(rows, hidden, device, dtype)
    given = {name: x.clone() for name, x in kw.items()}
    if rows:
        kw["input"][0, :128] = given["input"][0, :128] = -given["residual"][0, :128]  # a block of zeros
    assert fused_add_rmsnorm_fp8_block_quant(**kw, eps=1e-5) is None
    names = ("out", "block_scale", "normed_out", "residual")
    got = tuple(kw[name] for name in names)
    trace = fused_add_rmsnorm_fp8_block_quant_trace
    assert trace.check(trace.reference(**given, eps=1e-5), got)
    if not rows:
        return
    assert torch.equal(kw["residual"], (given["input"].float() + given["residual"].float()).to(dtype))
    # The codes are exactly those of the rounded norm.
    blocks = kw["normed_out"].float().unflatten(1, (-1, 128))
    amax = blocks.abs().amax(2)
    q = torch.where(amax == 0, torch.ones_like(amax), torch.full_like(amax, 448.0) / amax)
    codes = (blocks * q.unsqueeze(2)).clamp(-448, 448).flatten(1).to(E4M3)
    assert torch.equal(kw["out"].view(torch.uint8), codes.view(torch.uint8))
    torch.testing.assert_close(kw["block_scale"][:, :rows], q.reciprocal().t(), rtol=1e-6, atol=0)
    assert kw["block_scale"][0, 0] == 1.0 and (kw["block_scale"][:, rows:] == -1.0).all()


def test_rows_of_wider_tensors(device):
    kw = arguments(3, 512, device)
    fused_add_rmsnorm_fp8_block_quant(**{name: x if name == "weight" else x.clone() for name, x in kw.items()})
    wide = {name: torch.zeros(3, 640, dtype=x.dtype, device=device) for name, x in kw.items() if x.shape == (3, 512)}
    for name, x in wide.items():
        x[:, :512] = kw[name]
    fused_add_rmsnorm_fp8_block_quant(**{**kw, **{name: x[:, :512] for name, x in wide.items()}})
    again = {**kw, "normed_out": kw["input"]}  # in place
    fused_add_rmsnorm_fp8_block_quant(**again)
    assert torch.equal(wide["normed_out"][:, :512], again["normed_out"])
    assert torch.equal(wide["out"][:, :512].view(torch.uint8), again["out"].view(torch.uint8))
    assert not wide["out"][:, 512:].float().any() and not wide["residual"][:, 512:].any()


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"hidden": 384}, r"input\.shape\[1\] must be a multiple of 256 up to 8192, or of 512 up to 16384, got 384"),
        ({"hidden": 8448}, "got 8448"),
        ({"block_scale": (2, 3)}, r"block_scale\.shape\[1\] must be at least input\.shape\[0\] = 5, got 3"),
        ({"block_scale": (3, 8)}, r"block_scale\.shape\[0\]"),
        ({"weight": (128,)}, r"weight\.shape\[0\]"),
        ({"residual": (4, 256)}, "residual"),
        ({"out": (5, 128)}, "out"),
    ],
    ids=str,
)
def test_refused(device, changes, text):
    shapes = dict(changes)
    kw = arguments(5, shapes.pop("hidden", 256), device)
    kw |= {name: torch.zeros(shape, dtype=kw[name].dtype, device=device) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=text):
        fused_add_rmsnorm_fp8_block_quant(**kw)


def test_refused_overlaps(device):
    kw = arguments(2, 256, device)
    with pytest.raises(ValueError, match="residual"):
        fused_add_rmsnorm_fp8_block_quant(**{**kw, "residual": kw["input"]})
