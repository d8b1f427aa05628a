# SPDX-License-Identifier: Apache-2.0
"""The general CUDA kernel on a GPU, whatever faster kernels the device has: every kernel, far strides, graphs, PDL."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashinfer.gemm.launch import BATCHED, MASKED, PACKED
from flashinfer.jit.gemm import get_gemm_module

from ..graphs import capture
from .references import BF16, E4M3, E5M2, FP16, FP32, block_scales, check, dequantized, operand, poisoned

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gemm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, a_scale=None, b_scale=None, bias=None, groups=None,
         grouping=BATCHED, granularity=(1, 128, 128), pdl=False) -> torch.Tensor:  # fmt: skip
    """Call the general module, which ``product`` does not do where a faster one serves the layout."""
    native = get_gemm_module("cuda").gemm
    native(out, a, b, a_scale, b_scale, bias, groups, None, grouping, *granularity, 1.0, 0.0, pdl)
    return out


#: Rows and weights of each tile. 2048 x 2200 are 288 large tiles, more than any GPU has multiprocessors.
SIZES = [(7, 200), (33, 200), (70, 200), (2048, 2200)]


@pytest.mark.parametrize("m, n", SIZES)
@pytest.mark.parametrize("dtype", [FP16, BF16, E4M3, E5M2])
def test_chunks(m, n, dtype):
    """K of several rounds of the ring, with a tail."""
    a, b = operand(m, 1040, dtype=dtype, device="cuda"), operand(n, 1040, dtype=dtype, device="cuda")
    check(gemm(poisoned(m, n, dtype=BF16, device="cuda"), a, b), a.double(), b.double())


@pytest.mark.parametrize("m, n", SIZES)
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_columns(m, n, dtype):
    a, b = operand(m, 520, dtype=dtype, device="cuda"), operand(520, n, dtype=dtype, device="cuda").mT
    check(gemm(poisoned(m, n, dtype=FP32, device="cuda"), a, b), a.double(), b.double())


@pytest.mark.parametrize("m, n", SIZES)
@pytest.mark.parametrize("dtype", [FP32, BF16, E4M3])
def test_any(m, n, dtype):
    """Rows that are not aligned, and a result by columns."""
    a, b = operand(m, 333, dtype=dtype, device="cuda"), operand(n, 333, dtype=dtype, device="cuda")
    check(gemm(poisoned(n, m, dtype=FP16, device="cuda").mT, a, b), a.double(), b.double())


@pytest.mark.parametrize("m, n", SIZES)
@pytest.mark.parametrize("k, granularity", [(1040, (1, 128, 128)), (330, (16, 1, 48)), (1040, (1, 128, 256))])
def test_block_scales(m, n, k, granularity):
    gm, gn, gk = granularity
    a, b = operand(m, k, dtype=E4M3, device="cuda"), operand(n, k, dtype=E4M3, device="cuda")
    a_scale, b_scale = block_scales(a, gm, gk), block_scales(b, gn, gk)
    out = poisoned(m, n, dtype=BF16, device="cuda")
    gemm(out, a, b, a_scale=a_scale, b_scale=b_scale, granularity=granularity)
    check(out, dequantized(a, a_scale, gm, gk), dequantized(b, b_scale, gn, gk))


@pytest.mark.parametrize("k", [64, 67])  # chunks and any
def test_far_rows(k):
    """Offsets beyond 2^32 elements."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB")
    far = torch.empty((40 << 27) + 128, dtype=torch.uint8, device="cuda").view(E4M3).as_strided((40, k), (1 << 27, 1))
    far.copy_(operand(40, k, dtype=E4M3, device="cuda"))
    near = operand(50, k, dtype=E4M3, device="cuda")
    check(gemm(poisoned(50, 40, dtype=BF16, device="cuda"), near, far), near.double(), far.double())
    check(gemm(poisoned(40, 50, dtype=BF16, device="cuda"), far, near), far.double(), near.double())


@pytest.mark.parametrize("mean", [6, 60, 600])
def test_many_groups(mean):
    """More groups than lanes of a warp; counts change between replays of a graph."""
    lengths = torch.randint(0, 2 * mean, (70,), generator=torch.Generator().manual_seed(3))
    indptr = torch.zeros(71, dtype=torch.int32, device="cuda")
    rows, out = 140 * mean, poisoned(140 * mean, 328, dtype=BF16, device="cuda")
    a, b = operand(rows, 256, dtype=E4M3, device="cuda"), operand(70, 328, 256, dtype=E4M3, device="cuda")
    a_scale, b_scale = block_scales(a, 1, 128), block_scales(b, 128, 128)
    graph, _ = capture(lambda: gemm(out, a, b, a_scale=a_scale, b_scale=b_scale, groups=indptr, grouping=PACKED))
    tokens, weights = dequantized(a, a_scale, 1, 128), dequantized(b, b_scale, 128, 128)
    for order in (lengths, lengths.flip(0)):
        indptr[1:] = order.cumsum(0)
        out.fill_(7)
        graph.replay()
        ends = [0, *order.cumsum(0).tolist()]
        for group, (begin, end) in enumerate(itertools.pairwise(ends)):
            check(out[begin:end], tokens[begin:end], weights[group])
        assert out[ends[-1] :].eq(7).all()


def test_masked_groups():
    counts = torch.randint(0, 200, (40,), generator=torch.Generator().manual_seed(3))
    a, b = operand(40, 199, 128, dtype=BF16, device="cuda"), operand(40, 200, 128, dtype=BF16, device="cuda")
    out = torch.full((40, 199, 200), 7.0, dtype=BF16, device="cuda")
    gemm(out, a, b, groups=counts.int().cuda(), grouping=MASKED)
    for group, count in enumerate(counts.tolist()):
        check(out[group, :count], a[group, :count].double(), b[group].double())
        assert out[group, count:].eq(7).all()


def test_repeatable_and_launched_early():
    """A chain of products, each of which reads the one before, is the same with and without PDL, in every run."""
    x, w = operand(5, 512, dtype=BF16, device="cuda") / 32, operand(512, 512, dtype=BF16, device="cuda") / 32

    def chain(pdl: bool) -> torch.Tensor:
        y = x
        for _ in range(8):
            y = gemm(poisoned(5, 512, dtype=BF16, device="cuda"), y, w, pdl=pdl)
        return y

    first = chain(False)
    assert first.isfinite().all()
    for _ in range(5):
        assert chain(True).equal(first)
