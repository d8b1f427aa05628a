# SPDX-License-Identifier: Apache-2.0
"""fp8_blockscale_gemm_sm90: quantises inside, honours scales of rows and of blocks."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer
from flashinfer.gemm import fp8_blockscale_gemm_sm90
from flashinfer.gemm.blockscale import quantize_rows, quantize_weight_blocks
from flashinfer.trace.templates.gemm import fp8_blockscale_gemm_sm90_trace
from flashinfer.trace.templates.gemm_blocks import spread_scales, to_e4m3_blocks

from .scaled import close

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
ATOL = 2e-3  # sums in another order, then one rounding to bf16
reference = fp8_blockscale_gemm_sm90_trace.reference


def on(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("CUDA devices other than SM90 are refused")


def bf16(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device).bfloat16()


def codes(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device).to(E4M3)


def scales(*shape: int, device: str) -> torch.Tensor:
    """Return scales that all differ, so that one read from a wrong place changes the result."""
    return torch.rand(shape, device=device) + 0.5


@pytest.mark.parametrize("m, n, k", [(1, 64, 128), (7, 192, 384), (65, 128, 256)])
@pytest.mark.parametrize("by", ["row", "block"])
@pytest.mark.parametrize("out_dtype", [BF16, FP16])
def test_bf16_times_e4m3(device, m, n, k, by, out_dtype):
    on(device)
    x, w = bf16(m, k, device=device), codes(n, k, device=device)
    scale = scales(n if by == "row" else -(-n // 128), k // 128, device=device)
    expected = reference(x, w, None, scale, out_dtype)
    out = torch.full((m, n), torch.nan, dtype=out_dtype, device=device)
    assert fp8_blockscale_gemm_sm90(x, w, None, scale, out) is out
    close(out, expected, ATOL)
    fresh = fp8_blockscale_gemm_sm90(input=x, weight=w, weight_scale=scale, out_dtype=out_dtype)
    close(fresh, expected, ATOL)
    exact = x.double() @ (w.double() * spread_scales(scale.double(), n, k)).T
    assert torch.nn.functional.cosine_similarity(out.double().flatten(), exact.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("m, n, k", [(1, 64, 128), (6, 192, 256)])
def test_bf16_times_bf16(device, m, n, k):
    on(device)
    x, w = bf16(m, k, device=device), bf16(n, k, device=device)
    close(fp8_blockscale_gemm_sm90(x, w), reference(x, w), ATOL)


@pytest.mark.parametrize("m, n, k", [(1, 64, 128), (6, 192, 384)])
def test_e4m3_times_e4m3(device, m, n, k):
    """Check scales of the input in their published layout: blocks of K first, rows padded to a multiple of 4."""
    on(device)
    x, w = codes(m, k, device=device), codes(n, k, device=device)
    x_scale = scales(k // 128, -(-m // 4) * 4, device=device)[:, :m]
    w_scale = scales(-(-n // 128), k // 128, device=device)
    out = fp8_blockscale_gemm_sm90(x, w, x_scale, w_scale)
    close(out, reference(x, w, x_scale, w_scale), ATOL)


@pytest.mark.parametrize("m", range(1, 10))
@pytest.mark.parametrize("n, k", [(64, 128), (192, 3456)])
@pytest.mark.parametrize("gap", [0, 8, 3])
def test_few_rows(device, m, n, k, gap):
    """Check up to 8 rows, which the product quantises itself on Hopper, and 9; rows that lie apart or are unaligned."""
    on(device)
    x, w = bf16(m, k + gap, device=device)[:, :k], codes(n, k, device=device)
    x[m // 2, :128] = 0
    scale = scales(-(-n // 128), k // 128, device=device)
    out = torch.full((m, n), torch.nan, dtype=BF16, device=device)
    fp8_blockscale_gemm_sm90(x, w, None, scale, out)
    close(out, reference(x, w, None, scale), ATOL)
    row_codes, row_scales = quantize_rows(x)
    close(out, reference(row_codes, w, row_scales, scale), ATOL)


def test_quantisation(device):
    """Check both quantisers bit by bit, with a block of zeros and rows that do not begin at 16 bytes."""
    x = bf16(5, 3 * 128 + 1, device=device)[:, 1:]
    x[2, :128] = 0
    actual, scale = quantize_rows(x)
    expected, factors = to_e4m3_blocks(x, 1)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scale, factors.T)
    w = bf16(192, 256, device=device)
    w[:128, :128] = 0
    actual, scale = quantize_weight_blocks(w)
    expected, factors = to_e4m3_blocks(w, 128)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scale, factors)


def test_zeros(device):
    on(device)
    x, w = torch.zeros(3, 128, dtype=BF16, device=device), bf16(64, 128, device=device)
    assert (fp8_blockscale_gemm_sm90(x, w) == 0).all()
    assert fp8_blockscale_gemm_sm90(x[:0], w).shape == (0, 64)


def test_torch_compile(device):
    on(device)
    x, w, scale = bf16(3, 256, device=device), codes(64, 256, device=device), scales(1, 2, device=device)

    def layer(x, w, scale):
        return fp8_blockscale_gemm_sm90(x + 1, w, None, scale) * 2

    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x, w, scale), layer(x, w, scale))


# Errors, in the published words.

M, N, K = 4, 128, 256
GOOD = {"input": ((M, K), E4M3), "weight": ((N, K), E4M3), "input_scale": (K // 128, M), "weight_scale": (1, K // 128)}


def arguments(device: str, **changes) -> dict:
    made = {}
    for name, value in (GOOD | changes).items():
        if name in ("input", "weight", "out"):
            value = torch.ones(value[0], device=device).to(value[1])
        elif isinstance(value, tuple):
            value = torch.ones(value, device=device)
        made[name] = value
    return made


BF16_INPUT = {"input": ((M, K), BF16), "input_scale": None}
BF16_BOTH = BF16_INPUT | {"weight": ((N, K), BF16), "weight_scale": None}
WRONG = {
    "rank": ({"input": ((2, M, K), E4M3)}, "must be 2D"),
    "rank of weight": ({"weight": ((N * K,), E4M3)}, "must be 2D"),
    "K": ({"weight": ((N, K + 128), E4M3)}, "K dimension mismatch"),
    "K blocks": ({"input": ((M, 96), E4M3), "weight": ((N, 96), E4M3)}, "divisible by block size"),
    "N": ({"weight": ((96, K), E4M3)}, "divisible by 64"),
    "pair": ({"weight": ((N, K), BF16), "weight_scale": None}, "FP8 input.*BF16 weight.*not supported"),
    "pair before scales": ({"weight": ((N, K), BF16), "input_scale": None}, "FP8 input.*BF16 weight.*not supported"),
    "input_scale": ({"input_scale": None}, "input_scale is required when input is FP8"),
    "input_scale dtype": ({"input_scale": torch.ones(K // 128, M).double()}, "input_scale must be float32"),
    "input_scale turned": ({"input_scale": (M, K // 128)}, "input_scale shape mismatch"),
    "input dtype": ({"input": ((M, K), FP16)}, "FP8.*or BF16"),
    "weight dtype": ({"weight": ((N, K), FP16)}, "FP8.*or BF16"),
    "input_scale of BF16": ({"input": ((M, K), BF16)}, "input_scale should not be provided for BF16"),
    "weight_scale": ({"weight_scale": None}, "weight_scale is required when weight is FP8"),
    "weight_scale shape": ({"weight_scale": (2, K // 128)}, "weight_scale shape mismatch"),
    "weight_scale dtype": ({"weight_scale": torch.ones(1, K // 128).half()}, "weight_scale must be float32"),
    "weight_scale of BF16": (
        BF16_BOTH | {"weight_scale": (1, K // 128)},
        "weight_scale should not be provided for BF16",
    ),
    "out shape": ({"out": ((M, N + 1), BF16)}, "Output shape mismatch"),
    "out dtype": ({"out": ((M, N), torch.float32)}, "Output dtype"),
    "out dtype given": ({"out": ((M, N), BF16), "out_dtype": FP16}, "Output dtype"),
    "out_dtype": ({"out_dtype": torch.float32}, "output dtype"),
}


@pytest.mark.parametrize("changes, text", WRONG.values(), ids=WRONG)
def test_errors(device, changes, text):
    on(device)
    fp8_blockscale_gemm_sm90(**arguments(device))
    with pytest.raises(ValueError, match=f"fp8_blockscale_gemm_sm90: .*{text}"):
        fp8_blockscale_gemm_sm90(**arguments(device, **changes))


def test_out_on_another_device():
    given = arguments("cpu")
    with pytest.raises(ValueError, match="Output device mismatch"):
        fp8_blockscale_gemm_sm90(**given, out=torch.empty(M, N, dtype=BF16, device="meta"))


def test_other_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(flashinfer.utils, "get_compute_capability", lambda device: (10, 0))
    with FakeTensorMode(), pytest.raises(ValueError, match=r"only supported on SM90.*got SM100"):
        fp8_blockscale_gemm_sm90(torch.empty(M, K, device="cuda"), torch.empty(N, K, device="cuda"))


def test_an_argument_of_another_kind_is_named():
    with pytest.raises(TypeError, match=r"fp8_blockscale_gemm_sm90: weight must be Tensor.*, got a NoneType"):
        fp8_blockscale_gemm_sm90(torch.ones(M, K, dtype=BF16), None)
