# SPDX-License-Identifier: Apache-2.0
"""MLA with backend "fa3" on an SM90 device. tests/mla/test_emulated_mla.py runs its kernels without one."""

from __future__ import annotations

import pytest
import torch

from flashinfer import BatchMLAPagedAttentionWrapper

from ..graphs import capture
from ..hopper.devices import needs_hopper
from .latent import BF16, F16, FP8, Latent, close, workspace

pytestmark = needs_hopper
TOLERANCE = {F16: 2e-3, BF16: 1e-2}


def run(batch: Latent, causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    wrapper = BatchMLAPagedAttentionWrapper(workspace("cuda"), backend="fa3")
    return batch.plan(wrapper, causal).run(*batch.arguments, return_lse=True)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [1, 5, 8, 16, 32, 64, 128])
def test_pages(page_size, causal, dtype):
    batch = Latent("cuda", page_size, dtype=dtype)
    close(run(batch, causal), batch.expected(causal), TOLERANCE[dtype])


@pytest.mark.parametrize(
    "heads, qo_len, kv_len", [(128, 1, 5000), (128, 2, 333), (16, 4, 1025), (40, 3, 700), (64, 1, 64)]
)
def test_splits(heads, qo_len, kv_len):
    """Few requests, whose keys are split over all SMs."""
    batch = Latent("cuda", 64, [qo_len, qo_len], [kv_len, kv_len // 3], heads=heads, dtype=BF16)
    close(run(batch, True), batch.expected(True), TOLERANCE[BF16])


def test_many_requests():
    """Several items for each block, of lengths that are no multiple of anything; results are reproducible."""
    lens = [(37 * i) % 517 for i in range(300)]
    batch = Latent("cuda", 16, [1 + i % 3 for i in range(300)], lens, dtype=BF16)
    first, second = run(batch, True), run(batch, True)
    close(first, batch.expected(True), TOLERANCE[BF16])
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_strides_of_queries():
    """Queries that were transposed, or are columns of one tensor, and pages with a gap between them."""
    batch = Latent("cuda", 16, [2, 1], [100, 33], dtype=BF16)
    batch.q_nope = batch.q_nope.transpose(0, 1).contiguous().transpose(0, 1)
    batch.q_pe = torch.cat([batch.q_nope, batch.q_pe], -1)[..., 512:]
    batch.caches = tuple(torch.cat([x, x], 1)[:, : batch.page_size] for x in batch.caches)
    close(run(batch), batch.expected(), TOLERANCE[BF16])


def test_cuda_graph():
    """A graph that is replayed with another plan."""
    first, second = (
        Latent("cuda", 16, *lens, dtype=BF16) for lens in (([2, 2, 2], [300, 5, 64]), ([2, 1, 2], [4, 400, 63]))
    )
    rows, pages, _, lens = (torch.empty_like(x) for x in first.tables)
    indices = torch.zeros(200, dtype=torch.int32, device="cuda")
    wrapper = BatchMLAPagedAttentionWrapper(workspace("cuda"), True, rows, pages, indices, lens, backend="fa3")
    first.plan(wrapper, True)
    inputs = [*(x.clone() for x in first.arguments[:2]), *(x.new_zeros(200, *x.shape[1:]) for x in first.caches)]
    graph, (out, lse) = capture(lambda: wrapper.run(*inputs, return_lse=True))
    second.plan(wrapper, True)
    for buffer, values in zip(inputs, second.arguments, strict=True):
        buffer[: len(values)].copy_(values)
    graph.replay()
    count = len(second.q_nope)
    close((out[:count], lse[:count]), second.expected(True), TOLERANCE[BF16])


@pytest.mark.parametrize("kpe", [64, 0])
@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("heads", [16, 128])
def test_fp8_cache(heads, page_size, kpe):
    """One scale of the cache, and scales of keys and 128 columns."""
    batch = Latent("cuda", page_size, kpe=kpe, dtype=BF16, kv_dtype=FP8, heads=heads)
    wrapper = batch.plan(BatchMLAPagedAttentionWrapper(workspace("cuda"), backend="fa3"), True)
    result = wrapper.run(*batch.arguments, return_lse=True, ckv_scale=0.5, kpe_scale=0.25)
    close(result, batch.expected(True, batch.ckv.float() * 0.5, batch.kpe.float() * 0.25), 2e-2)
    scales = 0.25 + torch.rand(len(batch.ckv), 4, device="cuda")
    array = batch.pages.scatter(scales.unsqueeze(1), "NHD").squeeze(2).contiguous()
    ckv = batch.ckv.float() * scales.repeat_interleave(128, -1).unsqueeze(1)
    result = wrapper.run(*batch.arguments, return_lse=True, ckv_scale_arr=array, kpe_scale=0.5)
    close(result, batch.expected(True, ckv, batch.kpe.float() * 0.5), 2e-2)


def test_fp8_splits():
    """Few requests of many keys, whose parts are merged; zeros give exactly zero."""
    batch = Latent("cuda", 16, [1, 2], [9000, 3000], kpe=0, dtype=BF16, kv_dtype=FP8)
    wrapper = batch.plan(BatchMLAPagedAttentionWrapper(workspace("cuda"), backend="fa3"))
    result = wrapper.run(*batch.arguments, return_lse=True, ckv_scale=0.7, kpe_scale=1.0)
    close(result, batch.expected(ckv=batch.ckv.float() * 0.7), 2e-2)
    zeros = [x.zero_() for x in batch.caches]
    assert not wrapper.run(batch.q_nope, batch.q_pe, *zeros, ckv_scale=0.7, kpe_scale=1.0).any()


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_without_rotary_columns(page_size, dtype):
    batch = Latent("cuda", page_size, kpe=0, dtype=dtype)
    close(run(batch, True), batch.expected(True), TOLERANCE[dtype])
