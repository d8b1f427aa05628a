# SPDX-License-Identifier: Apache-2.0
"""Calls while torch allocates on another device by default, as after ``torch.set_default_device("cuda")``.

Whatever is made without a device lands on "meta" here, where nothing can be computed.
"""

from __future__ import annotations

import pytest
import torch

import flashinfer

from . import calls
from .inputs import Batch, int32
from .reference import Attention

PAGE_SIZE = 4
SIZES = (4, 2, 64, PAGE_SIZE)  # query heads, KV heads, head_dim, tokens per page


def checked(call, expected) -> None:
    with torch.device("meta"):
        got = call()
    calls.check(got, expected, torch.float16)


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_decode(device, tensor_cores):
    batch = Batch([1, 1], [7, 9], device=device)
    pages = batch.pages(PAGE_SIZE)
    cache, workspace = batch.cache(pages), calls.workspace(device)

    def call():
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=tensor_cores)
        wrapper.plan(*pages.table, *SIZES)
        wrapper.run(batch.q, cache)
        return wrapper.run(batch.q, cache, return_lse=True)

    checked(call, batch.expected())


def test_prefill(device):
    batch = Batch([3, 5], [7, 9], device=device)
    pages = batch.pages(PAGE_SIZE)
    cache, workspace = batch.cache(pages), calls.workspace(device)
    mask = torch.ones(66, dtype=torch.bool, device=device)

    def paged():
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace)
        wrapper.plan(batch.qo_indptr, *pages.table, *SIZES, custom_mask=mask)
        return wrapper.run(batch.q, cache, return_lse=True)

    def ragged():
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace)
        wrapper.plan(batch.qo_indptr, batch.kv_indptr, 4, 2, 64)
        return wrapper.run(batch.q, batch.k, batch.v, return_lse=True)

    checked(paged, batch.expected())
    checked(ragged, batch.expected())


def test_one_request(device):
    batch = Batch([1], [9], device=device)
    mask = torch.ones(1, 9, dtype=torch.bool, device=device)
    prefill, decode = flashinfer.single_prefill_with_kv_cache, flashinfer.single_decode_with_kv_cache
    checked(lambda: prefill(batch.q, batch.k, batch.v, custom_mask=mask, return_lse=True), batch.expected())
    rows = lambda: [x[None] for x in decode(batch.q[0], batch.k, batch.v, return_lse=True)]  # noqa: E731
    checked(rows, batch.expected())


def test_block_sparse(device):
    batch = Batch([8], [12], device=device)
    indptr, indices = int32([0, 3, 6], device), int32([0, 1, 2, 0, 1, 2], device)
    workspace = calls.workspace(device)

    def call():
        wrapper = flashinfer.BlockSparseAttentionWrapper(workspace)
        wrapper.plan(indptr, indices, 8, 12, 4, 4, 4, 2, 64)
        return wrapper.run(batch.q, batch.k, batch.v, return_lse=True)

    checked(call, batch.expected())


def test_mla(device):
    sizes = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512, "latent": True}
    batch = Batch([1, 1], [7, 9], device=device, **sizes)
    pages = batch.pages(PAGE_SIZE)
    keys = pages.scatter(batch.k, "NHD").squeeze(2)
    tensors = [x.contiguous() for x in (batch.q[..., :512], batch.q[..., 512:], keys[..., :512], keys[..., 512:])]
    workspace = calls.workspace(device)

    def call():
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace)
        tables = (batch.qo_indptr, pages.indptr, pages.indices, pages.lens)
        wrapper.plan(*tables, 16, 512, 64, PAGE_SIZE, False, 0.1, torch.float16, torch.float16)
        return wrapper.run(*tensors, return_lse=True)

    checked(call, batch.expected(Attention(sm_scale=0.1)))
