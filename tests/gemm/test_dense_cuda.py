# SPDX-License-Identifier: Apache-2.0
"""CUDA-only behaviour of the dense products: graphs, streams, both sides of the rule."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import gemm
from flashinfer.trace.templates import gemm as templates

from ..graphs import capture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CLOSE = {"rtol": 2**-7, "atol": 2e-2}
N, K = 256, 512
MANY = 20480  # output features from which few rows are for our kernels on a Hopper


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def integers(most: int, *shape: int) -> torch.Tensor:
    """Return fp8 integers whose products have exact sums, even in the 13 bits that SM90 keeps."""
    return torch.randint(-most, most + 1, shape, device="cuda").float().to(E4M3)


def is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


@pytest.mark.parametrize("m, n", [(5, MANY), (5, N), (80, N)])  # our kernel, cuBLASLt twice
def test_graph(m, n):
    """Check that a captured step computes anew from what its inputs hold at each replay."""
    x, w, bias = normal(m, K), normal(n, K), normal(n)
    x8, w8 = integers(2, 1, m, K), integers(1, 1, n, K)
    scale = torch.full((), 0.5, device="cuda")
    blocks = torch.rand(n // 128, K // 128, device="cuda") + 0.5
    tiny = torch.empty(m, n, dtype=BF16, device="cuda")

    def step():
        gemm.tinygemm_bf16(x, w, tiny, bias, use_pdl=True)
        results = [flashinfer.mm_bf16(x, w.T), flashinfer.mm_bf16(x, w.T, bias, out_dtype=torch.float32)]
        results.append(flashinfer.bmm_fp8(x8, w8.mT, scale, scale, BF16))
        if is_hopper():
            results.append(gemm.fp8_blockscale_gemm_sm90(x, w8[0], None, blocks))
        return results

    graph, results = capture(step)
    for _ in range(3):
        x.copy_(torch.randn_like(x, dtype=torch.float32))
        x8.copy_(integers(2, 1, m, K))
        scale.mul_(2)
        graph.replay()
        torch.testing.assert_close(results[0], templates.mm_bf16_trace.reference(x, w.T), **CLOSE)
        expected = templates.mm_bf16_trace.reference(x, w.T, bias, torch.float32)
        torch.testing.assert_close(results[1], expected, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(tiny, expected.to(BF16), **CLOSE)
        expected = templates.bmm_fp8_trace.reference(x8, w8.mT, scale, scale)
        torch.testing.assert_close(results[2], expected, rtol=2**-7, atol=2e-2 * float(scale) ** 2)
        if is_hopper():
            expected = templates.fp8_blockscale_gemm_sm90_trace.reference(x, w8[0], None, blocks)
            torch.testing.assert_close(results[3], expected, **CLOSE)


@pytest.mark.parametrize("m, n", [(1, MANY), (1, N), (64, N), (65, N), (300, N)])
@pytest.mark.parametrize("backend", ["cudnn", "cublaslt", "tinygemm"])
def test_backends_agree(m, n, backend):
    a, b = normal(m, K), normal(n, K).T
    torch.testing.assert_close(
        flashinfer.mm_bf16(a, b, backend=backend), templates.mm_bf16_trace.reference(a, b), **CLOSE
    )


def test_chain_with_overlapping_launches():
    """Check that a product waits for the one that writes its input, back to back on one stream."""
    x, w = normal(4, K), [normal(K, K) / K**0.5 for _ in range(8)]
    expected = x
    for weight in w:
        expected = templates.mm_bf16_trace.reference(expected, weight.T)
    for _ in range(20):
        y = x
        for weight in w:
            out = torch.empty_like(y)
            gemm.tinygemm_bf16(y, weight, out, use_pdl=True)
            y = out
        torch.testing.assert_close(y, expected, rtol=2**-4, atol=2**-4)


def test_other_stream():
    a, b = normal(7, K), normal(MANY, K).T
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = flashinfer.mm_bf16(a, b)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(out, templates.mm_bf16_trace.reference(a, b), **CLOSE)
