# SPDX-License-Identifier: Apache-2.0
"""Page ids of 64 bits or with strides, and pages at large offsets. CPU calls reject page ids outside of the cache among
pages that hold keys; GPU calls cannot.
"""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from flashinfer._runtime.errors import ArgumentError

from . import calls
from .inputs import Batch

KV_LENS, PAGE = [7, 0, 9, 33], 4


@pytest.mark.parametrize("kind", [BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper])
@pytest.mark.parametrize("place, value", [(0, -1), (3, 1 << 24)])
def test_pages_outside_of_the_cache(kind, place, value):
    batch = Batch([1] * len(KV_LENS), KV_LENS, device="cpu")
    pages = batch.pages(PAGE)
    cache = batch.cache(pages, form="combined")
    indptr, indices, last_page_len = pages.table
    rows = [] if kind is BatchDecodeWithPagedKVCacheWrapper else [batch.qo_indptr]
    wrapper = kind(calls.workspace("cpu"))

    def attend(ids: torch.Tensor) -> torch.Tensor:
        wrapper.plan(*rows, indptr, ids, last_page_len, *batch.heads, 64, PAGE, q_data_type=torch.float16)
        return wrapper.run(batch.q, cache)

    bad = indices.clone()
    bad[place] = value
    expected = attend(torch.cat([indices, bad]))  # entries behind the pages of the last request are not read
    with pytest.raises(ArgumentError, match=rf"kv_indices\[{place}\] must be 0 to {len(cache) - 1}.*, got {value}"):
        attend(bad)
    assert torch.equal(attend(indices), expected)


@pytest.mark.parametrize("kind", ["decode", "prefill", "ragged"])
def test_index_arrays_with_strides(device, kind):
    batch = Batch([1, 1, 1], [7, 5, 9], device=device)
    pages = batch.pages(PAGE)

    def apart(*arrays: torch.Tensor) -> list[torch.Tensor]:
        return [torch.stack([x, x + 1000], dim=1)[:, 0] for x in arrays]

    options = {"q_data_type": torch.float16}
    given = (batch.q, batch.cache(pages, form="combined"))
    if kind == "decode":
        wrapper = BatchDecodeWithPagedKVCacheWrapper(calls.workspace(device))
        wrapper.plan(*apart(*pages.table), *batch.heads, 64, PAGE, **options)
    elif kind == "prefill":
        wrapper = BatchPrefillWithPagedKVCacheWrapper(calls.workspace(device))
        wrapper.plan(*apart(batch.qo_indptr, *pages.table), *batch.heads, 64, PAGE, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(calls.workspace(device))
        wrapper.plan(*apart(batch.qo_indptr, batch.kv_indptr), *batch.heads, 64, **options)
        given = (batch.q, batch.k, batch.v)
    torch.testing.assert_close(wrapper.run(*given).float(), batch.expected()[0], rtol=2e-3, atol=2e-3)


FAR = 1 << 30  # elements between pages: offsets exceed 2^31 elements and 2^32 bytes from page 2 on


def far_pages(pages: torch.Tensor) -> torch.Tensor:
    """Return the same pages, FAR elements apart. The memory in between is allocated and, on a CPU, never touched."""
    room = (len(pages) - 1) * FAR + pages[0].numel()
    far = torch.empty(room, dtype=pages.dtype, device=pages.device).as_strided(
        pages.shape, (FAR, *pages[0].contiguous().stride())
    )
    return far.copy_(pages)


@pytest.mark.parametrize("kind", ["decode", "tensor_cores", "prefill"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_far_apart(device, kind, layout):
    batch = Batch([1, 1], [7, 5] if kind != "prefill" else [9, 3], device=device)
    pages = batch.pages(PAGE)
    cache = batch.cache(pages, layout, "combined")[:4]
    indices = torch.tensor([3, 0, 2, 1][: len(pages.indices)], dtype=torch.int64, device=device)
    indptr, _, last_page_len = pages.table
    options = {"q_data_type": torch.float16}
    sizes = (*batch.heads, 64, PAGE)
    if kind == "prefill":
        wrapper = BatchPrefillWithPagedKVCacheWrapper(calls.workspace(device), layout)
        wrapper.plan(batch.qo_indptr, indptr, indices, last_page_len, *sizes, **options)
    else:
        tensor_cores = kind == "tensor_cores"
        wrapper = BatchDecodeWithPagedKVCacheWrapper(calls.workspace(device), layout, use_tensor_cores=tensor_cores)
        wrapper.plan(indptr, indices, last_page_len, *sizes, **options)
    cache = cache.nan_to_num(0.5)
    assert torch.equal(wrapper.run(batch.q, far_pages(cache)), wrapper.run(batch.q, cache))


def test_latent_pages_far_apart(device):
    ckv, kpe = (torch.randn(4, PAGE, dim, device=device).half() for dim in (512, 64))
    q_nope, q_pe = (torch.randn(2, 16, dim, device=device).half() for dim in (512, 64))
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(calls.workspace(device))
    rows, lens = torch.arange(3, device=device).int(), torch.tensor([7, 5], device=device).int()
    indices = torch.tensor([3, 0, 2, 1], device=device)
    wrapper.plan(rows, rows * 2, indices, lens, 16, 512, 64, PAGE, False, 0.1, torch.float16, torch.float16)
    expected = wrapper.run(q_nope, q_pe, ckv, kpe)
    assert torch.equal(wrapper.run(q_nope, q_pe, far_pages(ckv), far_pages(kpe)), expected)


def test_appending_to_pages_far_apart(device):
    cache = torch.zeros(4, 2, PAGE, 2, 64, device=device, dtype=torch.float16)
    far = far_pages(cache)
    rows = torch.randn(10, 2, 64, device=device).half()
    batch_indices, positions = torch.zeros(10, device=device).int(), torch.arange(10, device=device).int()
    indices, indptr, last = (torch.tensor(x, device=device) for x in ([3, 2, 1], [0, 3], [2]))
    for target in (cache, far):
        flashinfer.append_paged_kv_cache(rows, rows + 1, batch_indices, positions, target, indices, indptr, last)
    assert cache.any() and torch.equal(cache, far)


def test_page_ids_of_more_than_32_bits(device):
    """Check page ids in host memory, where their range is validated."""
    huge = torch.tensor([0, (1 << 32) + 1])
    indptr, last = torch.tensor([0, 2]), torch.tensor([1])
    q, cache = torch.zeros(1, 2, 64, device=device).half(), torch.zeros(2, 2, PAGE, 2, 64, device=device).half()
    decode = BatchDecodeWithPagedKVCacheWrapper(calls.workspace(device))
    prefill = BatchPrefillWithPagedKVCacheWrapper(calls.workspace(device))
    message = "must contain numbers of 32 bits, got 4294967297"
    with pytest.raises(ArgumentError, match=message):
        decode.plan(indptr, huge, last, 2, 2, 64, PAGE)
    with pytest.raises(ArgumentError, match=message):
        prefill.plan(torch.tensor([0, 1]), indptr, huge, last, 2, 2, 64, PAGE)
    with pytest.raises(ArgumentError, match=message):
        decode.plan(huge, indptr, last, 2, 2, 64, PAGE)
    decode.plan(indptr, huge % 2, last, 2, 2, 64, PAGE)
    assert not decode.run(q, cache).any()
    if device == "cpu":
        table = (torch.zeros(1), torch.zeros(1))
        with pytest.raises(ArgumentError, match=f"kv_indices {message}"):
            flashinfer.append_paged_kv_cache(q, q, *(x.int() for x in table), cache, huge, indptr, last)


def test_caches_that_kernels_cannot_address(device):
    if device == "cpu" or torch.cuda.mem_get_info()[0] < 72 << 30:
        pytest.skip("needs 72 GiB of GPU memory")
    stride = (64 << 30) // 2
    memory = torch.empty(stride + 2 * PAGE * 2 * 64, dtype=torch.float16, device=device)
    cache = memory.as_strided((2, 2, PAGE, 2, 64), (stride, PAGE * 128, 128, 64, 1))
    decode = BatchDecodeWithPagedKVCacheWrapper(calls.workspace(device))
    decode.plan(torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([1]), 2, 2, 64, PAGE)
    with pytest.raises(
        ArgumentError, match=r"the last row of k must be less than \d+ bytes behind the first .*, got \d+"
    ):
        decode.run(torch.zeros(1, 2, 64, device=device).half(), cache)
