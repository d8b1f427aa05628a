# SPDX-License-Identifier: Apache-2.0
"""State of a wrapper between calls: arrays that callers modify after plan(), failed plans, cached validation."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from flashinfer._runtime.errors import ArgumentError
from flashinfer.decode import planning
from flashinfer.mla import BatchMLAPagedAttentionWrapper

from .inputs import Batch
from .reference import Attention
from .wrappers import close, paged, planned, ragged, workspace

QO_LENS, KV_LENS, PAGE = [5, 1, 3], [40, 7, 97], 8
CAUSAL = Attention(causal=True)


@pytest.fixture
def batch() -> Batch:
    return Batch(QO_LENS, KV_LENS)


def rows_of_one() -> Batch:
    return Batch([1] * len(KV_LENS), KV_LENS)


# ------------------------------------------------------------------------- arrays on the host are copied by plan()


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("runs_before", [0, 1])
def test_page_tables_of_decode_may_be_written_to(tensor_cores, runs_before):
    batch = rows_of_one()
    pages, expected = batch.pages(PAGE), batch.expected()
    wrapper, cache = planned(batch, pages, tensor_cores=tensor_cores), batch.cache(pages)
    for _ in range(runs_before):
        wrapper.run(batch.q, cache)
    for x in pages.table:
        x.fill_(-1)
    close(wrapper.run(batch.q, cache, return_lse=True), expected)
    close(wrapper.forward_return_lse(batch.q, cache, window_left=20), batch.expected(Attention(window_left=20)))


@pytest.mark.parametrize("runs_before", [0, 1])
def test_arrays_of_paged_prefill_may_be_written_to(batch, runs_before):
    pages, expected = batch.pages(PAGE), batch.expected()
    wrapper, cache = paged(batch, pages), batch.cache(pages)
    for _ in range(runs_before):
        wrapper.run(batch.q, cache)
    for x in (batch.qo_indptr, *pages.table):
        x.fill_(-1)
    close(wrapper.run(batch.q, cache, return_lse=True), expected)
    close(wrapper.forward_return_lse(batch.q, cache, causal=True), batch.expected(CAUSAL))


def test_arrays_of_ragged_prefill_may_be_written_to(batch):
    wrapper, expected = ragged(batch), batch.expected()
    batch.qo_indptr.fill_(-1)
    batch.kv_indptr.fill_(-1)
    close(wrapper.run(batch.q, *batch.dense(), return_lse=True), expected)
    close(wrapper.forward_return_lse(batch.q, *batch.dense(), causal=True), batch.expected(CAUSAL))


def test_packed_masks_and_items_may_be_written_to(batch):
    pages, shapes = batch.pages(PAGE), list(zip(QO_LENS, KV_LENS, strict=True))
    masks = [torch.rand(a, b) < 0.5 for a, b in shapes]
    packed = torch.cat([flashinfer.packbits(m.view(-1), bitorder="little") for m in masks])
    wrapper, cache = paged(batch, pages, packed_custom_mask=packed), batch.cache(pages)
    packed.zero_()
    expected = batch.expected([Attention(mask=m) for m in masks])
    close(wrapper.run(batch.q, cache, return_lse=True), expected)

    length, prefixes = max(KV_LENS) + 1, [4, 2, 50]
    places = (torch.arange(length) % 3).repeat(len(KV_LENS))
    items = torch.tensor(prefixes).to(torch.uint32), places.to(torch.uint16)
    options = {"prefix_len_ptr": items[0], "token_pos_in_items_ptr": items[1], "token_pos_in_items_len": length}
    wrapper = paged(batch, pages, **options)
    for x in items:
        x.view(torch.int16).zero_()
    expected = batch.expected([Attention(prefix_len=n, token_pos=places[:length]) for n in prefixes])
    close(wrapper.run(batch.q, cache, return_lse=True), expected)


def test_tables_of_mla_may_be_written_to():
    tables = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5], [0, 3, 8], [*range(8)], [20, 33])]
    q, cache = torch.randn(5, 4, 128).half(), torch.randn(8, PAGE, 128).half()
    wrapper = BatchMLAPagedAttentionWrapper(workspace("cpu"))
    wrapper.plan(*tables, 4, 128, 0, PAGE, False, 0.1, torch.float16, torch.float16)
    given = q, q[..., :0], cache, cache[..., :0]
    expected = wrapper.run(*given)
    for x in tables:
        x.fill_(-1)
    assert torch.equal(wrapper.run(*given), expected)


def test_tables_of_batch_pod_may_be_written_to(batch):
    """Check POD, whose prefill part is planned again for each other mask."""
    decode, pages = rows_of_one(), batch.pages(PAGE)
    decode_pages = decode.pages(PAGE)
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace("cpu"))
    tables = (batch.qo_indptr, *pages.table, decode.qo_indptr, *decode_pages.table)
    wrapper.plan(*tables, *batch.heads, 64, PAGE)
    for x in tables:
        x.fill_(-1)
    masks = [torch.rand(a, b) < 0.5 for a, b in zip(QO_LENS, KV_LENS, strict=True)]
    flat = torch.cat([m.view(-1) for m in masks])
    cache, decode_cache = batch.cache(pages), decode.cache(decode_pages)
    for options, what in (
        ({"causal_p": True}, CAUSAL),
        ({"custom_mask_p": flat}, [Attention(mask=m) for m in masks]),
        ({}, Attention()),
    ):
        outputs, scores = wrapper.run(batch.q, cache, decode.q, decode_cache, return_lse=True, **options)
        close((outputs[0], scores[0]), batch.expected(what))
        close((outputs[1], scores[1]), decode.expected())


def test_tables_of_a_shared_prefix_may_be_written_to(batch):
    pages, expected = batch.pages(PAGE), batch.expected(CAUSAL)
    wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace("cpu"))
    tables = (batch.qo_indptr, *pages.table)
    wrapper.begin_forward(*tables, *batch.heads, 64, PAGE)
    for x in tables:
        x.fill_(-1)
    none = torch.empty(0, batch.num_kv_heads, 64).half()
    out = wrapper.forward(batch.q, none, none, batch.cache(pages), causal=True)
    torch.testing.assert_close(out.float(), expected[0], rtol=2e-3, atol=2e-3)


# --------------------------------------------------------------------------------------------------- calls that fail


def test_a_refused_forward_changes_nothing(batch):
    pages = batch.pages(PAGE)
    wrapper, cache = paged(batch, pages), batch.cache(pages)
    for options in ({"pos_encoding_mode": "NOPE"}, {"sm_scale": "1"}, {"logits_soft_cap": "1"}):
        with pytest.raises((KeyError, TypeError)):
            wrapper.forward(batch.q, cache, causal=True, window_left=3, **options)
        close(wrapper.run(batch.q, cache, return_lse=True), batch.expected())


def test_a_forward_without_its_module_leaves_no_plan(batch, monkeypatch):
    decode = rows_of_one()
    prefill = paged(batch, batch.pages(PAGE))
    for wrapper, b, owner, name in (
        (prefill, batch, prefill, "_select_module"),
        (planned(decode, decode.pages(PAGE)), decode, planning, "module_of"),
    ):
        cache = b.cache(b.pages(PAGE))

        def missing(*_):
            raise RuntimeError("cannot be built")

        monkeypatch.setattr(owner, name, missing)
        with pytest.raises(RuntimeError, match="cannot be built"):
            wrapper.forward(b.q, cache, window_left=3)
        with pytest.raises(
            ArgumentError, match=r"plan\(\) must be called before run.*\(the last one failed, or workspaces"
        ):
            wrapper.run(b.q, cache)


@pytest.mark.parametrize("which", [0, 1])
def test_refused_workspaces_are_not_taken(batch, which):
    pages = batch.pages(PAGE)
    wrapper, cache = paged(batch, pages), batch.cache(pages)
    before = wrapper._float_workspace_buffer, wrapper._int_workspace_buffer
    for bad, text in (
        (workspace("cpu")[8:], "must be 16-byte aligned"),
        (workspace("cpu")[::2], "must be contiguous"),
        (torch.empty(1 << 20, dtype=torch.uint8, device="meta"), r"must be on cpu \(the wrapper's\), got meta"),
    ):
        given = [workspace("cpu"), workspace("cpu", 8 << 20)]
        given[which] = bad
        with pytest.raises(ArgumentError, match=text):
            wrapper.reset_workspace_buffer(*given)
        assert before[0] is wrapper._float_workspace_buffer and before[1] is wrapper._int_workspace_buffer
        close(wrapper.run(batch.q, cache, return_lse=True), batch.expected())


def test_batch_pod_is_planned_as_a_whole(batch):
    """Check that a plan of which one part fails does not leave the other part planned."""
    pages, other = batch.pages(PAGE), Batch(QO_LENS, [9, 9, 9])
    other_pages, cache = other.pages(PAGE), batch.cache(pages)
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace("cpu"))
    good = (batch.qo_indptr, *pages.table)
    wrapper.plan(*good, *good, *batch.heads, 64, PAGE)
    bad = (batch.qo_indptr, pages.indptr, pages.indices[:2], pages.last_page_len)
    with pytest.raises(ArgumentError, match=r"paged_kv_indices must have .*, got 2"):
        wrapper.plan(other.qo_indptr, *other_pages.table, *bad, *batch.heads, 64, PAGE)
    with pytest.raises(ArgumentError, match=r"BatchPODWithPagedKVCacheWrapper.run: .* \(the last one failed\)"):
        wrapper.run(batch.q, cache, batch.q, cache)
    wrapper.plan(*good, *good, *batch.heads, 64, PAGE)
    with pytest.raises(ArgumentError, match=r"custom_mask must have .*, got 3"):
        wrapper.run(batch.q, cache, batch.q, cache, custom_mask_p=torch.ones(3, dtype=torch.bool))
    outputs, scores = wrapper.run(batch.q, cache, batch.q, cache, return_lse=True)
    close((outputs[0], scores[0]), batch.expected())


def test_a_shared_prefix_after_a_refused_forward(batch):
    pages = batch.pages(PAGE)
    wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace("cpu"))
    wrapper.begin_forward(batch.qo_indptr, *pages.table, *batch.heads, 64, PAGE)
    given = (batch.q, *batch.dense(), batch.cache(pages))
    expected = wrapper.forward(*given)
    with pytest.raises(TypeError):
        wrapper.forward(*given, sm_scale="1")
    assert torch.equal(wrapper.forward(*given), expected)


def graph_buffers(batch: Batch) -> list[torch.Tensor]:
    """Return CUDA graph buffers (their rules hold on the CPU too): qo_indptr, kv_indptr, page ids, last_page_len."""
    size = len(batch.kv_lens)
    return [torch.zeros(n, dtype=torch.int32) for n in (size + 1, size + 1, 99, size)]


def test_failed_plans_freeze_nothing(batch):
    few, pages = rows_of_one(), batch.pages(PAGE)
    bad = (pages.indptr, pages.indices, pages.last_page_len + 100)
    sizes = (*batch.heads, 64, PAGE)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), "NHD", True, *graph_buffers(batch))
    with pytest.raises(ArgumentError, match=r"must have at most 40 keys .*, got 140"):
        wrapper.plan(few.qo_indptr, *bad, *sizes)
    wrapper.plan(batch.qo_indptr, *pages.table, *sizes)
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())
    with pytest.raises(ArgumentError, match=r"q must have at most 9 rows \(those of the first plan\).*, got 10"):
        wrapper.plan(torch.tensor([0, 6, 7, 10]), *pages.table, *sizes)

    decode = BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), "NHD", True, True, *graph_buffers(batch)[1:])
    with pytest.raises(ArgumentError, match=r"must have at most 40 keys .*, got 140"):
        decode.plan(*bad, *sizes, q_len_per_req=2)
    pages = few.pages(PAGE)
    decode.plan(*pages.table, *sizes)
    close(decode.run(few.q, few.cache(pages), return_lse=True), few.expected())
    with pytest.raises(ArgumentError, match=r"q_len_per_req must be 1 \(frozen by the first plan.*, got 2"):
        decode.plan(*pages.table, *sizes, q_len_per_req=2)


@pytest.mark.parametrize(
    "buffers, text",
    [
        (
            [torch.zeros(8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int32)],
            "offsets .*, got 63 and 4",
        ),
        ([torch.zeros(99, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32)], "at most 99 bytes and 2 offsets "),
        ([torch.zeros(99, dtype=torch.uint8)], "mask_indptr_buf must be a tensor"),
    ],
)
def test_mask_buffers_that_plans_without_a_mask_have_no_room_in(batch, buffers, text):
    """Check mask buffers that are too small for plans without a mask: every run reads the buffers."""
    pages = batch.pages(PAGE)
    paged = BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), "NHD", True, *graph_buffers(batch), *buffers)
    with pytest.raises(ArgumentError, match=text):
        paged.plan(batch.qo_indptr, *pages.table, *batch.heads, 64, PAGE)
    offsets = graph_buffers(batch)[:2]
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), "NHD", True, *offsets, *buffers)
    with pytest.raises(ArgumentError, match=text):
        ragged.plan(batch.qo_indptr, batch.kv_indptr, *batch.heads, 64)


def test_failed_plans_of_mla_freeze_nothing():
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 3, 99, 2)]
    wrapper = BatchMLAPagedAttentionWrapper(workspace("cpu"), True, *buffers)
    ids, rest = torch.arange(8), (4, 128, 0, PAGE, False, 0.1, torch.float16, torch.float16)
    with pytest.raises(ArgumentError, match=r"must have at most 24 keys .*, got 100"):
        # Offsets that are longer than the batch: those that are not are refused before the native plan.
        wrapper.plan(torch.tensor([0, 1, 2]), torch.tensor([0, 3, 8, 8]), ids, torch.tensor([100, 33]), *rest)
    wrapper.plan(torch.tensor([0, 2, 5]), torch.tensor([0, 3, 8]), ids, torch.tensor([20, 33]), *rest)
    q, cache = torch.randn(5, 4, 128).half(), torch.randn(8, PAGE, 128).half()
    assert wrapper.run(q, q[..., :0], cache, cache[..., :0]).isfinite().all()


# ------------------------------------------------------------------------------ validation is repeated when needed


@pytest.mark.parametrize("kind", ["decode", "tensor cores", "prefill"])
def test_a_smaller_cache_after_a_run(kind):
    batch = rows_of_one()
    pages = batch.pages(PAGE)
    wrapper = paged(batch, pages) if kind == "prefill" else planned(batch, pages, tensor_cores=kind != "decode")
    cache = batch.cache(pages, form="combined")
    for _ in range(2):
        wrapper.run(batch.q, cache)
    fewer = cache[: max(pages.indices_host)].clone()
    with pytest.raises(ArgumentError, match=rf"kv_indices\[\d+\] must be 0 to {len(fewer) - 1}.*, got {len(fewer)}"):
        wrapper.run(batch.q, fewer)
    close(wrapper.run(batch.q, cache, return_lse=True), batch.expected())


def test_a_smaller_cache_after_another_plan():
    """Check that a cache large enough for the first plan is rejected if the second plan needs more pages."""
    batch = rows_of_one()
    pages = batch.pages(PAGE)
    wrapper, cache = planned(batch, pages, tensor_cores=True), batch.cache(pages, form="combined")
    larger = torch.cat([cache, cache])
    indptr, indices, last = pages.table
    first = wrapper.run(batch.q, cache)
    wrapper.plan(indptr, indices + len(cache), last, *batch.heads, 64, PAGE)
    for _ in range(2):
        assert torch.equal(wrapper.run(batch.q, larger), first)
    with pytest.raises(ArgumentError, match=r"kv_indices\[\d+\] must be 0 to.*, got \d+"):
        wrapper.run(batch.q, larger[:-3])


def test_page_ids_written_to_the_buffers_of_a_graph():
    batch = rows_of_one()
    pages, buffers = batch.pages(PAGE), graph_buffers(batch)[1:]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), "NHD", True, False, *buffers)
    wrapper.plan(*pages.table, *batch.heads, 64, PAGE)
    cache = batch.cache(pages)
    for _ in range(2):
        wrapper.run(batch.q, cache)
    buffers[1][3] = 1 << 20
    with pytest.raises(ArgumentError, match=rf"kv_indices\[3\] must be 0 to.*, got {1 << 20}"):
        wrapper.run(batch.q, cache)


def test_a_smaller_cache_after_a_run_of_mla():
    q, cache = torch.randn(5, 4, 128).half(), torch.randn(8, PAGE, 128).half()
    wrapper = BatchMLAPagedAttentionWrapper(workspace("cpu"))
    tables = [torch.tensor(x) for x in ([0, 2, 5], [0, 3, 8], [*range(8)], [20, 33])]
    wrapper.plan(*tables, 4, 128, 0, PAGE, False, 0.1, torch.float16, torch.float16)
    for _ in range(2):
        wrapper.run(q, q[..., :0], cache, cache[..., :0])
    fewer = cache[:6].clone()
    with pytest.raises(ArgumentError, match=r"kv_indices\[6\] must be 0 to 5.*, got 6"):
        wrapper.run(q, q[..., :0], fewer, fewer[..., :0])


def test_rows_that_a_plan_of_mla_for_a_graph_has_and_the_queries_have_not():
    """Check queries with fewer rows than an MLA plan for a graph: kernels would write results past the output."""
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 3, 99, 2)]
    wrapper = BatchMLAPagedAttentionWrapper(workspace("cpu"), True, *buffers)
    tables, sizes = [torch.tensor([0, 3, 8]), torch.arange(8), torch.tensor([20, 33])], (4, 128, 0, PAGE, False, 0.1)
    q, cache = torch.randn(6, 4, 128).half(), torch.randn(8, PAGE, 128).half()
    for rows in (5, 3):
        wrapper.plan(torch.tensor([0, 1, rows]), *tables, *sizes, torch.float16, torch.float16)
        for given in (rows - 1, 6):
            some = q[:given]
            with pytest.raises(ArgumentError, match=f"must have at least {rows} rows .* and at most 5 .*, got {given}"):
                wrapper.run(some, some[..., :0], cache, cache[..., :0])
    padded = wrapper.run(q[:5], q[:5, :, :0], cache, cache[..., :0])
    assert torch.equal(padded[:3], wrapper.run(q[:3], q[:3, :, :0], cache, cache[..., :0]))


@pytest.mark.parametrize("kind", ["decode", "tensor cores", "prefill"])
def test_pages_of_seq_lens(kind):
    """Check that pages given by ``seq_lens`` are validated even if ``last_page_len`` does not cover them."""
    batch = rows_of_one()
    pages, sizes = batch.pages(PAGE), (*batch.heads, 64, PAGE)
    none, cache = torch.zeros_like(pages.last_page_len), batch.cache(pages)
    if kind == "prefill":
        wrapper, rows = BatchPrefillWithPagedKVCacheWrapper(workspace("cpu")), [batch.qo_indptr]
    else:
        wrapper, rows = BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), use_tensor_cores=kind != "decode"), []
    wrapper.plan(*rows, pages.indptr, pages.indices, none, *sizes, seq_lens=pages.lens)
    close(wrapper.run(batch.q, cache, return_lse=True), batch.expected())
    place = pages.indptr_host[1] - 1
    pages.indices[place] = 1 << 24
    wrapper.plan(*rows, pages.indptr, pages.indices, none, *sizes, seq_lens=pages.lens)
    with pytest.raises(ArgumentError, match=rf"kv_indices\[{place}\] must be 0 to.*, got {1 << 24}"):
        wrapper.run(batch.q, cache)
