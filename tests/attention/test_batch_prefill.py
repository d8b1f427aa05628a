# SPDX-License-Identifier: Apache-2.0
"""The batch prefill wrappers: results, options of plan and run, and rejected arguments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flashinfer import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
)
from flashinfer.attention import outputs

from .inputs import FORMS, LAYOUTS, Batch
from .reference import Attention
from .wrappers import F16, close, paged, ragged, workspace

QO_LENS, KV_LENS = [1, 17, 40, 3], [9, 33, 97, 130]


def batch_of(device: str, qo_lens=QO_LENS, kv_lens=KV_LENS, **options) -> Batch:
    return Batch(qo_lens, kv_lens, device=device, **options)


def both(batch: Batch, what, **options):
    """Return the results of both wrappers."""
    pages = batch.pages(8)
    yield paged(batch, pages, **options).run(batch.q, batch.cache(pages), return_lse=True), batch.expected(what)
    yield ragged(batch, **options).run(batch.q, *batch.dense(), return_lse=True), batch.expected(what)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_layouts_and_forms(device, layout, form):
    batch = batch_of(device)
    pages = batch.pages(8)
    wrapper = paged(batch, pages, layout, causal=True)
    cache = batch.cache(pages, layout, form)
    close(wrapper.run(batch.q, cache, return_lse=True), batch.expected(Attention(causal=True)))
    out = torch.empty_like(batch.q)
    assert wrapper.run(batch.q, cache, out=out) is out


def test_rows_before_the_first_request(device, monkeypatch):
    """Check rows before the first request: zero in allocated outputs, unchanged in the caller's outputs."""
    batch, first = batch_of(device), 5
    pages, expected = batch.pages(8), batch.expected(Attention())
    shifted, heads = batch.qo_indptr + first, (*batch.heads, batch.head_dim_qk)
    q = torch.cat([torch.zeros_like(batch.q[:first]), batch.q])
    monkeypatch.setattr(outputs, "new_empty", lambda x, dtype, *shape: x.new_full(shape, math.nan, dtype=dtype))
    for wrapper, kv, tables in (
        (paged(batch, pages), (batch.cache(pages),), (*pages.table, *heads, pages.page_size)),
        (ragged(batch), batch.dense(), (batch.kv_indptr, *heads)),
    ):
        wrapper.run(batch.q, *kv)  # this call is cached, and must not be repeated for the next plan
        wrapper.plan(shifted, *tables)
        for _ in range(2):
            out, lse = wrapper.run(q, *kv, return_lse=True)
            assert not out[:first].any() and torch.isneginf(lse[:first]).all()
            close((out[first:], lse[first:]), expected)
        given = torch.full_like(out, 7)
        assert (wrapper.run(q, *kv, out=given)[:first] == 7).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_layouts_and_strides(device, layout):
    batch = batch_of(device)
    wrapper = ragged(batch, layout, causal=True)
    k, v = batch.dense(layout)
    expected = batch.expected(Attention(causal=True))
    close(wrapper.run(batch.q, k, v, return_lse=True), expected)
    joined = torch.cat([k, v], dim=-1)
    close(wrapper.run(batch.q, joined[..., :64], joined[..., 64:], return_lse=True), expected)
    wide = torch.cat([batch.q, batch.q], dim=1)[:, : batch.num_qo_heads]
    close(wrapper.run(wide, k, v, return_lse=True), expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "window_left": 11},
        {"window_left": 0},
        {"causal": True, "sm_scale": 0.3, "use_fp16_qk_reduction": True},
    ],
)
def test_options(device, options):
    known = {k: v for k, v in options.items() if k != "use_fp16_qk_reduction"}
    for got, expected in both(batch_of(device), Attention(**known), **options):
        close(got, expected)


@pytest.mark.parametrize(
    "options, what",
    [
        ({"logits_soft_cap": 5.0}, {"logits_soft_cap": 5.0}),
        ({"logits_soft_cap": -5.0}, {}),
        ({"pos_encoding_mode": "ALIBI"}, {"alibi": True}),
        ({"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 1e3}, {"rope": True, "rope_theta": 1e3}),
    ],
)
def test_compiled_options(device, options, what):
    for got, expected in both(batch_of(device), Attention(causal=True, **what), causal=True, **options):
        close(got, expected, 1e-2)


def test_more_queries_than_keys(device):
    batch = batch_of(device, [9, 5], [4, 0])
    for got, expected in both(batch, Attention(causal=True), causal=True):
        close(got, expected)
        assert (got[0][:5] == 0).all() and (got[1][:5] == -torch.inf).all()


def test_values_of_another_head_dimension(device):
    batch = batch_of(device, head_dim_qk=192, head_dim_vo=128)
    for got, expected in both(batch, Attention(), head_dim_vo=128):
        close(got, expected)


def masks_of(batch: Batch) -> list[torch.Tensor]:
    masks = [torch.rand(q, k) < 0.5 for q, k in zip(batch.qo_lens, batch.kv_lens, strict=True)]
    masks[0][:] = False  # one row that sees no key
    return masks


@pytest.mark.parametrize("packed", [False, True])
def test_custom_masks_replace_causal(device, packed):
    batch = batch_of(device)
    masks = masks_of(batch)
    flat = torch.cat([mask.flatten() for mask in masks]).to(device)
    what = [Attention(mask=mask, window_left=25) for mask in masks]
    if packed:
        pieces = [np.packbits(mask.numpy().flatten(), bitorder="little") for mask in masks]
        given = {"packed_custom_mask": torch.from_numpy(np.concatenate(pieces)).to(device), "custom_mask": ~flat}
    else:
        given = {"custom_mask": flat}
    for got, expected in both(batch, what, causal=True, window_left=25, **given):
        close(got, expected)


def test_a_plan_without_mask_forgets_the_last_one(device):
    batch = batch_of(device)
    flat = torch.cat([mask.flatten() for mask in masks_of(batch)]).to(device)
    wrapper = ragged(batch, custom_mask=flat)
    assert wrapper._custom_mask_buf is not None and wrapper._mask_indptr_buf is not None
    wrapper.plan(batch.qo_indptr, batch.kv_indptr, *batch.heads, 64, causal=True)
    assert wrapper._custom_mask_buf is None
    close(wrapper.run(batch.q, *batch.dense(), return_lse=True), batch.expected(Attention(causal=True)))


def test_multi_item_scoring(device):
    prefixes, items = [5, 8], [[3, 4], [2, 6, 1]]
    places = [[0] + [t for n in lens for t in [*range(1, n + 1), 0]] for lens in items]
    kv_lens = [p + len(x) for p, x in zip(prefixes, places, strict=True)]
    batch = batch_of(device, [kv_lens[0], kv_lens[1] - 4], kv_lens)
    width = max(map(len, places))
    table = torch.zeros(2, width, dtype=torch.int32)
    for row, place in enumerate(places):
        table[row, : len(place)] = torch.tensor(place)
    what = [Attention(prefix_len=p, token_pos=torch.tensor(x)) for p, x in zip(prefixes, places, strict=True)]
    options = {
        "prefix_len_ptr": torch.tensor(prefixes, dtype=torch.int32, device=device).to(torch.uint32),
        "token_pos_in_items_ptr": table.flatten().to(torch.uint16).to(device),
        "token_pos_in_items_len": width,
        "max_item_len_ptr": torch.tensor([4, 6], dtype=torch.int32, device=device).to(torch.uint16),
    }
    for got, expected in both(batch, what, **options):
        close(got, expected)


@pytest.mark.parametrize("fixed", [{"fixed_split_size": 3}, {"disable_split_kv": True}])
def test_fixed_splits_do_not_depend_on_the_batch(device, fixed):
    batch = batch_of(device, [30, 2], [40, 300])
    pages = batch.pages(8)
    cache = batch.cache(pages)
    out, _ = paged(batch, pages, causal=True, **fixed).run(batch.q, cache, return_lse=True)
    alone = BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    first, last = pages.indptr_host[1:3]
    table = (torch.tensor([0, last - first]), pages.indices[first:last], pages.last_page_len[1:])
    alone.plan(torch.tensor([0, 2]), *table, *batch.heads, 64, 8, causal=True, **fixed)
    assert torch.equal(alone.run(batch.q[30:], cache), out[30:])


def test_seq_lens_replace_last_page_len(device):
    batch = batch_of(device)
    pages = batch.pages(8)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrong = torch.ones_like(pages.last_page_len)
    wrapper.plan(batch.qo_indptr, pages.indptr, pages.indices, wrong, *batch.heads, 64, 8, seq_lens=pages.lens)
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())


@pytest.mark.parametrize("as_tensor", [False, True])
def test_scales(device, as_tensor):
    batch = batch_of(device)
    pages = batch.pages(8)
    scales = {"q_scale": 0.5, "k_scale": 3.0, "v_scale": 2.0}
    expected = batch.expected(Attention(**scales))
    given = {k: torch.tensor([v], device=device) for k, v in scales.items()} if as_tensor else scales
    close(paged(batch, pages).run(batch.q, batch.cache(pages), return_lse=True, **given), expected, 5e-3)
    close(ragged(batch).run(batch.q, *batch.dense(), return_lse=True, **given), expected, 5e-3)


@pytest.mark.parametrize("k_scale", [1e-8, 1e6])
def test_scales_in_host_memory_have_their_full_range(device, k_scale):
    """Check extreme scales in host memory: multiplied into float16 queries they would give 0 or infinity."""
    batch = batch_of(device)
    pages, scale = batch.pages(8), torch.tensor([k_scale])
    options = {"sm_scale": 0.125 / k_scale}
    got = paged(batch, pages, **options).run(batch.q, batch.cache(pages), return_lse=True, k_scale=scale)
    close(got, batch.expected())
    one = batch.part(0, 1)
    got = single_prefill_with_kv_cache(one.q, *one.dense(), return_lse=True, k_scale=scale, **options)
    close(got, one.expected())


def test_fp8_queries(device):
    fp8 = torch.float8_e4m3fn
    batch = batch_of(device, dtype=fp8)
    pages = batch.pages(8)
    options = {"q_data_type": fp8, "kv_data_type": fp8, "o_data_type": F16, "causal": True}
    expected = batch.expected(Attention(causal=True, q_scale=0.5, k_scale=2.0, v_scale=3.0))
    heads = [torch.full((n,), s, device=device) for n, s in ((4, 0.5), (2, 2.0), (2, 3.0))]
    for scales in (heads, (0.5, 2.0, 3.0)):
        got = paged(batch, pages, **options).run(batch.q, batch.cache(pages), *scales, return_lse=True)
        close(got, expected, 1e-2)
        close(ragged(batch, **options).run(batch.q, *batch.dense(), *scales, return_lse=True), expected, 1e-2)
    for place, name, count in ((0, "scale_q", 4), (1, "scale_k", 2), (2, "scale_v", 2)):
        scales = [*heads[:place], torch.ones(3, device=device), *heads[place + 1 :]]
        with pytest.raises(ValueError, match=f"{name} must have 1 or {count} elements.*, got 3"):
            paged(batch, pages, **options).run(batch.q, batch.cache(pages), *scales)
    wrapper = ragged(batch, q_data_type=fp8, kv_data_type=fp8, o_data_type=fp8)
    assert wrapper._cached_o_data_type == torch.bfloat16


def test_nvfp4(device):
    batch = batch_of(device, kv_dtype=torch.uint8)
    pages = batch.pages(8)
    expected = batch.expected(Attention(causal=True, k_scale=0.5, v_scale=0.25))
    options = {"q_data_type": F16, "kv_data_type": torch.uint8, "causal": True}
    scales = {"k_scale": 0.5, "v_scale": 0.25, "return_lse": True}
    wrapper = paged(batch, pages, **options)
    close(wrapper.run(batch.q, batch.cache(pages), kv_cache_sf=batch.cache_sf(pages), **scales), expected, 1e-2)
    with pytest.raises(ValueError, match="kv_cache_sf"):
        wrapper.run(batch.q, batch.cache(pages))
    keys, values = batch.cache_sf(pages)
    for bad in (keys[..., :3], keys[1:], keys[:, :, :1], keys.float()):  # wrong columns, pages, heads, dtype
        with pytest.raises(ValueError, match=r"kv_cache_sf of keys must be torch\.float8_e4m3fn \("):
            wrapper.run(batch.q, batch.cache(pages), kv_cache_sf=(bad, values))
        with pytest.raises(ValueError, match="kv_cache_sf of values must be"):
            wrapper.run(batch.q, batch.cache(pages), kv_cache_sf=(keys, bad))
    wrapper = ragged(batch, **options)
    close(wrapper.run(batch.q, *batch.dense(), kv_cache_sf=(batch.k_sf, batch.v_sf), **scales), expected, 1e-2)
    with pytest.raises(ValueError, match="kv_cache_sf of values must be"):
        wrapper.run(batch.q, *batch.dense(), kv_cache_sf=(batch.k_sf, batch.v_sf[1:]))


@pytest.mark.parametrize("given", [False, True])
def test_bases_and_layouts_of_the_lse(device, given):
    batch = batch_of(device)
    pages = batch.pages(8)
    _, lse = batch.expected()
    wrapper = paged(batch, pages)
    shapes = {"NH": lse.shape, "HN": lse.T.shape}
    for layout, shape in shapes.items():
        for base, factor in (("log2", 1.0), ("ln", math.log(2))):
            buffer = torch.empty(shape, device=device) if given else None
            options = {"return_lse": True, "lse": buffer, "lse_base": base, "lse_layout": layout}
            _, got = wrapper.run(batch.q, batch.cache(pages), **options)
            assert got.is_contiguous() and (buffer is None or got is buffer)
            scores = (lse if layout == "NH" else lse.T) * factor
            torch.testing.assert_close(got, scores, rtol=2e-3, atol=2e-3)
            if buffer is not None:
                buffer.fill_(torch.nan)
                out = wrapper.run(batch.q, batch.cache(pages), lse=buffer, lse_base=base, lse_layout=layout)
                assert isinstance(out, torch.Tensor)
                torch.testing.assert_close(buffer, scores, rtol=2e-3, atol=2e-3)
    for options, text in (
        ({"lse_base": "log10"}, "lse_base"),
        ({"lse_layout": "H"}, "lse_layout"),
        ({"lse_layout": "HN", "lse": torch.empty(lse.shape, device=device).T}, "contiguous"),
    ):
        with pytest.raises(ValueError, match=text):
            wrapper.run(batch.q, batch.cache(pages), return_lse=True, **options)
    with pytest.raises(ValueError, match=r"lse_base must be .*, got 'log10'"):
        wrapper.run(batch.q, batch.cache(pages), lse_base="log10")


def test_a_buffer_for_the_lse_is_filled_unasked(device):
    """Check that the LSE buffer is filled without ``return_lse``: in first runs, repeated runs and after a new plan."""
    batch = batch_of(device)
    pages = batch.pages(8)
    expected = batch.expected()
    for wrapper, kv in ((paged(batch, pages), (batch.cache(pages),)), (ragged(batch), batch.dense())):
        for _ in range(3):
            lse = torch.full(expected[1].shape, torch.nan, device=device)
            close((wrapper.run(batch.q, *kv, lse=lse), lse), expected)
    wrapper, cache = paged(batch, pages), batch.cache(pages)
    wrapper.run(batch.q, cache)
    wrapper.plan(batch.qo_indptr, *pages.table, *batch.heads, batch.head_dim_qk, 8)
    lse = torch.full(expected[1].shape, torch.nan, device=device)
    close((wrapper.run(batch.q, cache, lse=lse), lse), expected)
    with pytest.raises(ValueError, match="Invalid shape of lse"):
        wrapper.run(batch.q, cache, lse=lse[1:])


def test_workspace_size_is_enough(device):
    batch = batch_of(device, [1, 40], [4096, 97])
    pages = batch.pages(16)
    arguments = (batch.qo_indptr, *pages.table, *batch.heads, 64, 16)
    for options in ({"causal": True}, {"fixed_split_size": 8}):
        probe = BatchPrefillWithPagedKVCacheWrapper(workspace(device))
        sizes = probe.workspace_size(*arguments, **options)
        assert probe._plan_info is None and sizes[1] > 0 and (sizes[0] > 0 or "fixed_split_size" not in options)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(device))
        wrapper.reset_workspace_buffer(*(torch.empty(n, dtype=torch.uint8, device=device) for n in sizes))
        wrapper.plan(*arguments, **options)
        expected = batch.expected(Attention(causal=options.get("causal", False)))
        close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), expected)


def test_only_plain_lists_of_pages_share_a_launch(device):
    """Check that only plans over pages without a custom mask may fuse decode and prefill in one launch. The last
    argument but one of the native plan tells; with other plans, SMs would stay partly idle.
    """
    batch = batch_of(device)
    pages = batch.pages(8)
    mask = torch.ones(sum(a * b for a, b in zip(QO_LENS, KV_LENS, strict=True)), dtype=torch.bool, device=device)
    assert ragged(batch)._work()[-2] == -1
    for options, expected in (({}, 0), ({"causal": True}, 0), ({"custom_mask": mask}, -1)):
        assert paged(batch, pages, **options)._work()[-2] == expected


def test_workspace_size_forgets_the_last_mask(device, monkeypatch):
    """Check that the workspace size is that of ``plan`` with the same arguments: causal mask, fused launch."""
    batch = batch_of(device)
    pages = batch.pages(8)
    mask = torch.ones(sum(a * b for a, b in zip(QO_LENS, KV_LENS, strict=True)), dtype=torch.bool, device=device)
    wrapper = paged(batch, pages, custom_mask=mask)
    monkeypatch.setattr(type(wrapper), "_native_workspace_size", lambda probe: probe._work()[11:])
    arguments = (batch.qo_indptr, *pages.table, *batch.heads, batch.head_dim_qk, pages.page_size)
    for options in ({"causal": True}, {"causal": True, "custom_mask": mask}):
        assert wrapper.workspace_size(*arguments, **options) == paged(batch, pages, **options)._work()[11:]


def test_legacy_forward_replaces_the_parameters(device):
    batch = batch_of(device)
    pages = batch.pages(8)
    cache, dense = batch.cache(pages), batch.dense()
    wrappers = (
        (paged(batch, pages, causal=True, window_left=5), (cache,)),
        (ragged(batch, causal=True, window_left=5), dense),
    )
    for wrapper, kv in wrappers:
        close((wrapper.forward(batch.q, *kv), batch.expected()[1]), batch.expected())
        got = wrapper.forward_return_lse(batch.q, *kv, causal=True, window_left=9)
        close(got, batch.expected(Attention(causal=True, window_left=9)))
        close(wrapper.run_return_lse(batch.q, *kv), batch.expected(Attention(causal=True, window_left=9)))
        wrapper.end_forward()


def test_forward_after_plans_of_engines(device):
    """Check ``forward(causal=...)`` after a plan of the native module without ``causal``, as SGLang makes it."""
    first, batch = batch_of(device, [1, 20, 40, 0], [33, 20, 60, 7]), batch_of(device)
    old, pages = first.pages(8), batch.pages(8)
    tables = {
        "_paged_kv_indptr_buf": pages.indptr,
        "_paged_kv_indices_buf": pages.indices,
        "_paged_kv_last_page_len_buf": pages.last_page_len,
    }
    cases = (
        (paged(first, old), (first.cache(old),), (batch.cache(pages),), tables, 8),
        (ragged(first), first.dense(), batch.dense(), {"_kv_indptr_buf": batch.kv_indptr}, 1),
    )
    causal = Attention(causal=True)
    for wrapper, old_kv, kv, tables, page_size in cases:
        close(wrapper.forward_return_lse(first.q, *old_kv, causal=True), first.expected(causal))
        tables = {**tables, "_qo_indptr_buf": batch.qo_indptr}
        for name, table in tables.items():
            setattr(wrapper, name, table)
        keys = pages.indptr if page_size > 1 else batch.kv_indptr
        memory = ("_float_workspace_buffer", "_int_workspace_buffer", "_pin_memory_int_workspace_buffer")
        wrapper._plan_info = wrapper._cached_module.plan(
            *(getattr(wrapper, name) for name in memory),
            *(batch.qo_indptr.cpu(), keys.cpu(), torch.tensor(KV_LENS, dtype=torch.int32), sum(QO_LENS), len(QO_LENS)),
            *(*batch.heads, page_size, False, 64, 64, False, -1),
        )
        wrapper._causal, wrapper._qo_indptr_last, wrapper._kv_indptr_last = False, sum(QO_LENS), sum(KV_LENS)
        close(wrapper.forward_return_lse(batch.q, *kv, causal=True), batch.expected(causal))


def test_plans_of_engines_leave_the_type_of_outputs_open(device):
    """Check outputs after SGLang's plan, which stores None as their dtype: they then have the dtype of the queries."""
    batch = batch_of(device)
    pages = batch.pages(8)
    for wrapper, kv in ((paged(batch, pages), (batch.cache(pages),)), (ragged(batch), batch.dense())):
        wrapper._cached_o_data_type = None
        for _ in range(2):
            out, lse = wrapper.run(batch.q, *kv, return_lse=True)
            assert out.dtype == F16
            close((out, lse), batch.expected())
        with pytest.raises(ValueError, match="Invalid dtype of out"):
            wrapper.run(batch.q, *kv, out=out.float())


def test_captured_forward_does_with_the_plan_there_is(device, monkeypatch):
    """Check that a captured ``forward`` uses the existing plan: a captured plan would be copied over later ones. SGLang
    plans without ``causal``, which it passes to the captured ``forward``; replays then follow plans without it too.
    """
    batch = batch_of(device)
    pages = batch.pages(8)
    causal = batch.expected(Attention(causal=True))
    cases = ((paged(batch, pages, fixed_split_size=2), (batch.cache(pages),)), (ragged(batch), batch.dense()))
    for wrapper, kv in cases:
        plan = wrapper._plan_info
        with monkeypatch.context() as context:
            context.setattr(type(wrapper), "_is_being_captured", lambda self: True)
            context.setattr(type(wrapper), "_prepare_capture", lambda self: None)
            close(wrapper.forward_return_lse(batch.q, *kv, causal=True), causal)
            assert wrapper._plan_info is plan
            close(
                wrapper.forward_return_lse(batch.q, *kv, causal=True, window_left=9),
                batch.expected(Attention(causal=True, window_left=9)),
            )
            with pytest.raises(ValueError, match="must not show more keys"):
                wrapper.forward(batch.q, *kv, causal=True)
        with pytest.raises(ValueError, match=r"plan\(\) must be called before run"):
            wrapper.run(batch.q, *kv)


def test_attributes_that_engines_use(device):
    batch = batch_of(device)
    pages = batch.pages(8)
    wrapper = paged(batch, pages, causal=True)
    assert wrapper._backend == "fa2" and wrapper._causal and wrapper._logits_soft_cap == 0.0
    assert wrapper._qo_indptr_last == sum(QO_LENS) and wrapper._batch_size == len(QO_LENS)
    assert (wrapper._max_q_len, wrapper._max_kv_len) == (max(QO_LENS), max(KV_LENS))
    assert wrapper._qo_indptr_buf.tolist() == batch.qo_indptr_host
    assert wrapper._max_total_num_rows is None and len(wrapper._plan_info) == 15
    wrapper.prewarm_paged_kv_stride_variant()
    with pytest.raises(RuntimeError):
        BatchPrefillWithPagedKVCacheWrapper(workspace(device)).prewarm_paged_kv_stride_variant()


def graph_buffers(device: str, batch_size: int = 4, pages: int = 64) -> list[torch.Tensor]:
    sizes = (batch_size + 1, batch_size + 1, pages, batch_size)
    return [torch.zeros(n, dtype=torch.int32, device=device) for n in sizes]


def test_graph_mode_of_the_paged_wrapper(device):
    batch = batch_of(device)
    pages = batch.pages(8)
    masks = masks_of(batch)
    flat = torch.cat([mask.flatten() for mask in masks]).to(device)
    mask_buffers = torch.zeros(4096, dtype=torch.uint8, device=device), torch.zeros(5, dtype=torch.int32, device=device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, *graph_buffers(device), *mask_buffers)
    arguments = (batch.qo_indptr, *pages.table, *batch.heads, 64, 8)
    wrapper.plan(*arguments, custom_mask=flat)
    assert wrapper._custom_mask_buf is mask_buffers[0] and wrapper._max_total_num_rows == sum(QO_LENS)
    expected = batch.expected([Attention(mask=mask) for mask in masks])
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), expected)
    more = batch_of(device, [41, 17, 40, 3])
    with pytest.raises(ValueError, match="must have at most 61"):
        wrapper.plan(more.qo_indptr, *pages.table, *batch.heads, 64, 8)
    with pytest.raises(ValueError, match=r"batch size must be 4.*, got 3"):
        wrapper.plan(batch.qo_indptr[:4], pages.indptr[:4], pages.indices, pages.last_page_len[:3], 4, 2, 64, 8)
    with pytest.raises(ValueError, match="at most 64"):
        wrapper.plan(batch.qo_indptr, pages.indptr, pages.indices.repeat(9), pages.last_page_len, 4, 2, 64, 8)
    bare = BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, *graph_buffers(device))
    with pytest.raises(ValueError, match="custom_mask_buf must be a tensor"):
        bare.plan(*arguments, custom_mask=flat)
    bare.plan(*arguments, causal=True)
    close(bare.run(batch.q, batch.cache(pages), return_lse=True), batch.expected(Attention(causal=True)))


def test_graph_mode_of_the_ragged_wrapper(device):
    batch = batch_of(device)
    buffers = graph_buffers(device)[:2]
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", True, *buffers)
    wrapper.plan(batch.qo_indptr, batch.kv_indptr, *batch.heads, 64, causal=True)
    close(wrapper.run(batch.q, *batch.dense(), return_lse=True), batch.expected(Attention(causal=True)))
    fewer = batch_of(device, [1, 2, 3, 4], [50, 2, 9, 4])
    wrapper.plan(fewer.qo_indptr, fewer.kv_indptr, *batch.heads, 64, causal=True)
    close(wrapper.run(fewer.q, *fewer.dense(), return_lse=True), fewer.expected(Attention(causal=True)))
    assert wrapper._kv_indptr_buf is buffers[1] and buffers[1].tolist() == fewer.kv_indptr_host


def test_bad_graph_buffers(device):
    buffers = graph_buffers(device)
    make = BatchPrefillWithPagedKVCacheWrapper
    with pytest.raises(ValueError, match="paged_kv_last_page_len_buf must be a tensor"):
        make(workspace(device), "NHD", True, *buffers[:3])
    with pytest.raises(ValueError, match=r"paged_kv_indptr_buf must have 5 elements.*, got 4"):
        make(workspace(device), "NHD", True, buffers[0], buffers[1][:4], *buffers[2:])
    with pytest.raises(ValueError, match=r"paged_kv_last_page_len_buf must have 4 elements.*, got 3"):
        make(workspace(device), "NHD", True, *buffers[:3], buffers[3][:3])
    with pytest.raises(ValueError, match="kv_indptr_buf must be a tensor"):
        BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", True, buffers[0])
    with pytest.raises(ValueError, match=r"kv_indptr_buf must have 5 elements.*, got 4"):
        BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", True, buffers[0], buffers[1][:4])


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"pos_encoding_mode": "SINE"}, KeyError, "SINE"),
        ({"custom_mask": torch.ones(3, dtype=torch.bool)}, ValueError, r"custom_mask must have .* elements .*, got 3"),
        (
            {"packed_custom_mask": torch.ones(3, dtype=torch.uint8)},
            ValueError,
            "packed_custom_mask must have .* bytes .*, got 3 elements",
        ),
        ({"kv_data_type": 3}, TypeError, "kv_data_type must be str or dtype.*, got a int"),
    ],
)
def test_bad_plans(options, error, text):
    batch = batch_of("cpu")
    for plan in (lambda **o: paged(batch, batch.pages(8), **o), lambda **o: ragged(batch, **o)):
        with pytest.raises(error, match=text):
            plan(**options)


def test_bad_plans_of_each():
    batch = batch_of("cpu")
    pages = batch.pages(8)
    with pytest.raises(ValueError, match=r"kv_indptr must have 5 elements.*, got 4"):
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
        wrapper.plan(batch.qo_indptr, batch.kv_indptr[:-1], *batch.heads, 64)
    with pytest.raises(ValueError, match=r"paged_kv_indptr must have 5 elements.*, got 4"):
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
        wrapper.plan(batch.qo_indptr, pages.indptr[:-1], pages.indices, pages.last_page_len[:-1], 4, 2, 64, 8)
    with pytest.raises(AssertionError, match="16-bit"):
        paged(batch, pages, o_data_type=torch.float8_e4m3fn)
    for backend in ("fa3", "cudnn", "trtllm-gen"):
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), backend=backend)
        with pytest.raises(NotImplementedError, match="usable: fa2"):
            wrapper.plan(batch.qo_indptr, *pages.table, *batch.heads, 64, 8)
    with pytest.raises(ValueError, match="16-byte aligned"):
        BatchPrefillWithPagedKVCacheWrapper(workspace("cpu")[4:])
    with pytest.raises(ValueError, match="variant_owns_mask"):
        BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), variant_owns_mask=True)


def test_bad_runs(device):
    batch = batch_of(device)
    pages = batch.pages(8)
    cache, (k, v) = batch.cache(pages), batch.dense()
    one, two = paged(batch, pages, window_left=3), ragged(batch)
    for run, error, text in (
        (lambda: one.run(batch.q.float(), cache), ValueError, "dtype of q .* does not match the q_data_type"),
        (lambda: one.run(batch.q, (cache[0].float(), cache[1])), ValueError, "does not match the kv_data_type"),
        (lambda: one.run(batch.q[1:], cache), ValueError, "q must have 61 rows.*, got 60"),
        (lambda: one.run(batch.q[:, :2], cache), ValueError, "4 heads, got 61 rows and 2 heads"),
        (lambda: one.run(batch.q, list(cache)), KeyError, "list"),
        (lambda: one.run(batch.q, tuple(x.transpose(1, 2) for x in cache)), ValueError, "pages of 8 tokens"),
        (lambda: one.run(batch.q, cache, window_left=4), AssertionError, "window_left must be 3.*, got 4"),
        (lambda: one.run(batch.q, cache, out=batch.q.float()), ValueError, "Invalid dtype of out"),
        (lambda: one.run(batch.q, cache, use_fp16_softmax=True), ValueError, "use_fp16_softmax"),
        (lambda: two.run(batch.q[1:], k, v), ValueError, "q must have 61 rows.*, got 60"),
        (lambda: two.run(batch.q, k[1:], v[1:]), ValueError, r"k must have 269 tokens .*, got 268 tokens of 2 heads"),
        (lambda: two.run(batch.q.float(), k, v), ValueError, "dtype of q"),
        (lambda: two.run(batch.q, k, v, 3.0), ValueError, "must be none"),
    ):
        with pytest.raises(error, match=text):
            run()
