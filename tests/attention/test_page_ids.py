# SPDX-License-Identifier: Apache-2.0
"""What a GPU cannot refuse, a CPU can: pages outside of the cache, among those that hold keys."""

from __future__ import annotations

import pytest
import torch

from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from flashinfer.errors import ArgumentError

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
    expected = attend(torch.cat([indices, bad]))  # nobody reads what lies behind the pages of the last request
    with pytest.raises(ArgumentError, match=rf"kv_indices\[{place}\] = {value}, expected 0 to {len(cache) - 1} "):
        attend(bad)
    assert torch.equal(attend(indices), expected)
