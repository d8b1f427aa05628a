# SPDX-License-Identifier: Apache-2.0
"""Copies of planned wrappers: a copy runs the plan that it was copied with; plans of one do not reach the other."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any, Iterator

import pytest
import torch

import flashinfer
from flashinfer.decode import fast_decode_plan
from flashinfer.mla import BatchDecodeMlaWithPagedKVCacheWrapper, BatchMLAPagedAttentionWrapper

from .inputs import Batch
from .wrappers import workspace

PAGE = 8


def table(batch: Batch) -> tuple[Any, ...]:
    """Return a page table with pages in the order of requests, the same at each call."""
    counts = [-(-n // PAGE) for n in batch.kv_lens]
    indptr = torch.tensor([0, *counts]).cumsum(0).int()
    last = torch.tensor([n - (c - 1) * PAGE for n, c in zip(batch.kv_lens, counts, strict=True)]).int()
    return indptr, torch.arange(sum(counts), dtype=torch.int32), last


def cache(batch: Batch) -> torch.Tensor:
    """Return keys and values of a cache, seeded by the batch only."""
    pages = sum(-(-n // PAGE) for n in batch.kv_lens)
    return torch.randn(pages, 2, PAGE, 2, 64, generator=torch.Generator().manual_seed(pages)).half()


def wrappers() -> Iterator[Any]:
    """Yield for each wrapper: its constructor, its plan for a batch of one row per request, and its run."""
    sizes = (4, 2, 64, PAGE)
    for tensor_cores in (False, True):
        yield pytest.param(
            lambda t=tensor_cores: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), use_tensor_cores=t),
            lambda w, b: w.plan(*table(b), *sizes),
            lambda w, b: w.run(b.q, cache(b)),
            id=f"decode-{tensor_cores}",
        )
    yield pytest.param(
        lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu")),
        lambda w, b: w.plan(b.qo_indptr, *table(b), *sizes, causal=True),
        lambda w, b: w.run(b.q, cache(b)),
        id="paged",
    )
    yield pytest.param(
        lambda: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu")),
        lambda w, b: w.plan(b.qo_indptr, b.kv_indptr, 4, 2, 64),
        lambda w, b: w.run(b.q, b.k, b.v),
        id="ragged",
    )
    yield pytest.param(
        lambda: flashinfer.BatchAttention(device="cpu"),
        lambda w, b: w.plan(
            *(b.qo_indptr, *table(b)[:2], torch.tensor(b.kv_lens)),
            4,
            2,
            64,
            64,
            PAGE,
            q_data_type=torch.float16,
            kv_data_type=torch.float16,
        ),
        lambda w, b: w.run(b.q, cache(b))[0],
        id="attention",
    )
    yield pytest.param(
        lambda: flashinfer.PODWithPagedKVCacheWrapper(workspace("cpu")),
        lambda w, b: w.plan(*table(b), *sizes),
        lambda w, b: torch.cat(w.run(b.q, b.k, b.v, b.q, cache(b))),
        id="pod",
    )
    yield pytest.param(
        lambda: flashinfer.BatchPODWithPagedKVCacheWrapper(workspace("cpu")),
        lambda w, b: w.plan(*(b.qo_indptr, *table(b)) * 2, *sizes),
        lambda w, b: torch.cat(w.run(b.q, cache(b), b.q, cache(b), causal_p=True)),
        id="batch-pod",
    )
    yield pytest.param(
        lambda: flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace("cpu")),
        lambda w, b: w.plan(*([x, x] for x in (b.qo_indptr, *table(b))), *sizes),
        lambda w, b: w.run(b.q, cache(b)),
        id="cascade",
    )
    yield pytest.param(
        lambda: flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace("cpu")),
        lambda w, b: w.begin_forward(*table(b), *sizes),
        lambda w, b: w.forward(b.q, b.k, b.v, cache(b)),
        id="shared-decode",
    )
    yield pytest.param(
        lambda: flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace("cpu")),
        lambda w, b: w.begin_forward(b.qo_indptr, *table(b), *sizes),
        lambda w, b: w.forward(b.q, b.k, b.v, cache(b)),
        id="shared-prefill",
    )
    yield pytest.param(
        lambda: flashinfer.BlockSparseAttentionWrapper(workspace("cpu")),
        lambda w, b: w.plan(torch.arange(len(b.q) + 1), torch.arange(len(b.q)), len(b.q), 8 * len(b.q), 1, 8, 4, 2, 64),
        lambda w, b: w.run(b.q, b.k[: 8 * len(b.q)], b.v[: 8 * len(b.q)]),
        id="blocks",
    )
    yield pytest.param(
        lambda: flashinfer.VariableBlockSparseAttentionWrapper(workspace("cpu")),
        lambda w, b: w.plan(
            *(torch.eye(len(b.q), dtype=torch.bool).expand(2, -1, -1), torch.ones(2, len(b.q)).int()),
            *(torch.full((2, len(b.q)), 8), 4, 2, 64),
        ),
        lambda w, b: w.run(
            *(x[:n].transpose(0, 1) for x, n in ((b.q, None), (b.k, 8 * len(b.q)), (b.v, 8 * len(b.q))))
        ),
        id="variable-blocks",
    )
    yield pytest.param(
        lambda: BatchMLAPagedAttentionWrapper(workspace("cpu")),
        lambda w, b: w.plan(
            *(b.qo_indptr, *table(b)[:2], torch.tensor(b.kv_lens), 4, 128, 0, PAGE, False, 0.1),
            *(torch.float16, torch.float16),
        ),
        lambda w, b: w.run(
            b.q.repeat(1, 1, 2), b.q[..., :0], cache(b).flatten(3)[:, 0], cache(b).flatten(3)[:, 0, :, :0]
        ),
        id="mla",
    )


FIRST, SECOND = [40, 97, 33], [130, 25, 40, 60, 90]


@pytest.mark.parametrize("make, plan, run", list(wrappers()))
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_plans_of_copies(make, plan, run, duplicate):
    wrapper = make()
    batch, other = Batch([1] * len(FIRST), FIRST), Batch([1] * len(SECOND), SECOND)
    plan(wrapper, other)
    of_other = run(wrapper, other)
    plan(wrapper, batch)
    expected = run(wrapper, batch)
    twin = duplicate(wrapper)
    assert torch.equal(run(twin, batch), expected)
    plan(twin, other)
    assert torch.equal(run(twin, other), of_other)
    assert torch.equal(run(wrapper, batch), expected)
    plan(wrapper, other)
    plan(twin, batch)
    assert torch.equal(run(twin, batch), expected)
    assert torch.equal(run(wrapper, other), of_other)


def test_what_copies_share():
    """Check that copy.copy shares the caller's buffers, copy.deepcopy shares none, and each copy has its own handle."""
    buffers = torch.zeros(4, dtype=torch.int32), torch.zeros(99, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), "NHD", True, False, *buffers)
    batch = Batch([1] * len(FIRST), FIRST)
    wrapper.plan(*table(batch), 4, 2, 64, PAGE)
    shallow, deep = copy.copy(wrapper), copy.deepcopy(wrapper)
    assert shallow._float_workspace_buffer is wrapper._float_workspace_buffer
    assert shallow._paged_kv_indices_buf is buffers[1] and deep._paged_kv_indices_buf is not buffers[1]
    owned = [w._int_workspace_buffer for w in (wrapper, shallow, deep)]
    owned += [w._pin_memory_int_workspace_buffer for w in (wrapper, shallow, deep)]
    scratch = [wrapper._float_workspace_buffer, deep._float_workspace_buffer]
    assert len({x.data_ptr() for x in (*scratch, *owned)}) == 8
    assert len({w._handle for w in (wrapper, shallow, deep)}) == 3
    expected = wrapper.run(batch.q, cache(batch))
    wrapper.plan(*table(Batch([1] * 3, [1, 1, 1])), 4, 2, 64, PAGE)  # writes the caller's buffers
    assert torch.equal(deep.run(batch.q, cache(batch)), expected)


def test_offsets_in_the_workspace():
    """Check offsets in the workspace, where plans for a GPU put them: a copy gets views of its own workspace."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    view = wrapper._int_workspace_buffer[16:28].view(torch.int32)
    wrapper._indptr_views[0, 3] = wrapper._paged_kv_indptr_buf = view
    for twin in (copy.copy(wrapper), copy.deepcopy(wrapper)):
        begin = twin._int_workspace_buffer.data_ptr() + 16
        assert twin._paged_kv_indptr_buf.data_ptr() == twin._indptr_views[0, 3].data_ptr() == begin
        assert begin != view.data_ptr()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_bound_plan_is_bound_to_the_copy(duplicate):
    batch, other = Batch([1] * len(FIRST), FIRST), Batch([1] * len(SECOND), SECOND)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(*table(batch), 4, 2, 64, PAGE)
    wrapper.plan = functools.partial(fast_decode_plan, wrapper)
    expected = wrapper.run(batch.q, cache(batch))
    twin = duplicate(wrapper)
    twin.plan(*table(other), 4, 2, 64, PAGE)
    assert twin.run(other.q, cache(other)).shape == other.q.shape
    assert torch.equal(wrapper.run(batch.q, cache(batch)), expected)


@pytest.mark.parametrize("make, plan, run", list(wrappers()))
def test_wrappers_cannot_be_pickled(make, plan, run):
    wrapper = make()
    name = type(wrapper).__name__
    with pytest.raises(TypeError, match=f"{name}: cannot be pickled: it must be made and planned"):
        pickle.dumps(wrapper)
    plan(wrapper, Batch([1] * len(FIRST), FIRST))
    with pytest.raises(TypeError, match=f"{name}: cannot be pickled"):
        pickle.dumps(wrapper)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_copies_of_the_legacy_wrapper(duplicate):
    wrapper = BatchDecodeMlaWithPagedKVCacheWrapper(workspace("cpu"))
    twin = duplicate(wrapper)
    assert twin._wrapper is not wrapper._wrapper
    assert twin._wrapper._int_workspace_buffer is not wrapper._wrapper._int_workspace_buffer
