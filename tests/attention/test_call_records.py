# SPDX-License-Identifier: Apache-2.0
"""Cached calls of run(): reuse of arguments, changes that invalidate the cache, and misaligned rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import flashinfer
from flashinfer.attention import call_records
from flashinfer.decode.plan import DecodeState
from flashinfer.decode.planning import plan_work
from flashinfer.mla.call_state import MLAState
from flashinfer.prefill.plan import PrefillState

from .inputs import FORMS, LAYOUTS, Batch
from .reference import Attention
from .wrappers import close, decode_batch, paged, planned, ragged, workspace


def counted(wrapper, monkeypatch):
    """Return a list that records each call of ``_launch_kept``, the path for calls that are not cached yet."""
    calls = []
    original = wrapper._launch_kept
    monkeypatch.setattr(wrapper, "_launch_kept", lambda *a: calls.append(a) or original(*a))
    return calls


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("page_size", [1, 8])
def test_decode_repeats(device, monkeypatch, layout, form, page_size, tensor_cores):
    batch = decode_batch(device)
    pages = batch.pages(page_size)
    wrapper = planned(batch, pages, layout, tensor_cores)
    long_way = counted(wrapper, monkeypatch)
    cache = batch.cache(pages, layout, form)
    first = wrapper.run(batch.q, cache, return_lse=True)
    out, lse = torch.empty_like(first[0]), torch.empty_like(first[1])
    for repetition in (
        wrapper.run(batch.q, cache, return_lse=True),
        wrapper.run(batch.q, cache, out=out, lse=lse, return_lse=True, q_scale=0.5, k_scale=2.0),
        (wrapper.run(batch.q, cache), first[1]),
        (wrapper.run(batch.q, cache, v_scale=2.0) / 2, first[1]),
    ):
        assert torch.equal(repetition[0], first[0]) and torch.equal(repetition[1], first[1])
    if page_size == 1:  # the token dimension of a page may be absent
        at = -3 if layout == "NHD" else -2
        short = tuple(x.squeeze(at) for x in cache) if isinstance(cache, tuple) else cache.squeeze(at)
        assert torch.equal(wrapper.run(batch.q, short), first[0])
    other = torch.randn_like(batch.q)
    assert not torch.equal(wrapper.run(other, cache), first[0])
    assert len(long_way) == 1
    close(first, batch.expected())


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_the_next_plan_of_decode(device, monkeypatch, tensor_cores):
    """Check the first run after a new plan: it reuses all other cached values, and still reports errors."""
    first, second, third = (
        decode_batch(device, kv_lens=lens) for lens in ([1, 54, 97, 700], [130, 20, 2000, 3], [9, 9, 9])
    )
    wrapper = planned(first, first.pages(8), tensor_cores=tensor_cores)
    long_way = counted(wrapper, monkeypatch)
    for batch in (first, second, first, third):
        pages = batch.pages(8)
        wrapper.plan(*pages.table, *batch.heads, 64, 8)
        for form in FORMS[:2]:
            close(wrapper.run(batch.q, batch.cache(pages, form=form), return_lse=True), batch.expected())
        assert wrapper.run(batch.q, batch.cache(pages)).shape == batch.q.shape
    assert len(long_way) == 1
    pages = third.pages(8)
    for options in ({"sm_scale": 0.01}, {"window_left": 3}):
        wrapper.plan(*pages.table, *third.heads, 64, 8, **options)
        got = wrapper.run(third.q, third.cache(pages), return_lse=True)
        close(got, third.expected(Attention(**options)))
    wrapper.plan(*pages.table, *third.heads, 64, 16)
    with pytest.raises(ValueError, match="as planned"):
        wrapper.run(third.q, third.cache(pages))
    for out in (None, torch.empty_like(first.q)):
        wrapper.plan(*pages.table, *third.heads, 64, 8)
        with pytest.raises(ValueError, match=r"q must have .*, got 4 rows"):
            wrapper.run(first.q, third.cache(pages), out=out)
    with pytest.raises(ValueError, match="dtype of q"):
        wrapper.run(third.q.float(), third.cache(pages))
    if device == "cpu":
        wrapper.plan(pages.indptr, pages.indices + 1000, pages.last_page_len, *third.heads, 64, 8)
        with pytest.raises(ValueError, match="must be 0 to"):
            wrapper.run(third.q, third.cache(pages))


def test_the_next_plan_of_prefill(device, monkeypatch):
    batches = [
        Batch(qo_lens, kv_lens, device=device)
        for qo_lens, kv_lens in (([5, 20], [40, 97]), ([1, 1, 130], [1, 700, 200]), ([1] * 4, [9, 17, 3000, 2]))
    ]
    wrapper = paged(batches[0], batches[0].pages(8), backend="fa2", causal=True)  # "auto" may change the module
    long_way = counted(wrapper, monkeypatch)
    what = Attention(causal=True)
    for batch in batches:
        pages = batch.pages(8)
        wrapper.plan(batch.qo_indptr, *pages.table, *batch.heads, 64, 8, causal=True)
        for _ in range(2):
            close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected(what))
    assert len(long_way) == 1
    wrapper.plan(batch.qo_indptr, *pages.table, *batch.heads, 64, 8, causal=True)
    with pytest.raises(ValueError, match="rows"):
        wrapper.run(batches[0].q, batch.cache(pages))
    wrapper.plan(batch.qo_indptr, *pages.table, *batch.heads, 64, 8, causal=False)
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())
    mask = torch.ones(sum(batch.kv_lens), dtype=torch.bool, device=device)
    mask[1] = mask[40] = False
    for _ in range(2):  # other mask tensors
        wrapper.plan(batch.qo_indptr, *pages.table, *batch.heads, 64, 8, custom_mask=mask)
        masks = [Attention(mask=m[None].cpu()) for m in mask.split(list(batch.kv_lens))]
        close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected(masks))


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_strides_of_single_elements(device, monkeypatch, tensor_cores):
    """Check size-1 dimensions (tokens, heads): their stride is never used, so no cache is copied because of it."""
    copied = []
    monkeypatch.setattr("flashinfer.attention.wrapper.aligned", lambda x: copied.append(x) or call_records.aligned(x))
    batch = Batch([1], [1], 1, 1, device=device)
    pages = batch.pages(1)
    wrapper = planned(batch, pages, tensor_cores=tensor_cores)
    cache = tuple(x.as_strided(x.shape, (x.stride(0), 3, 5, 1)) for x in batch.cache(pages))
    q = batch.q.as_strided(batch.q.shape, (7, 3, 1))
    for _ in range(2):
        close(wrapper.run(q, cache, return_lse=True), batch.expected())
    assert not copied


def test_prefill_repeats(device, monkeypatch):
    batch = Batch([5, 20], [40, 97], device=device)
    pages = batch.pages(8)
    for wrapper, keys in ((paged(batch, pages), [batch.cache(pages)]), (ragged(batch), batch.dense())):
        long_way = counted(wrapper, monkeypatch)
        results = [wrapper.run(batch.q, *keys, return_lse=True) for _ in range(3)]
        assert len(long_way) == 1
        for result in results:
            close(result, batch.expected())
        natural = wrapper.run(batch.q, *keys, return_lse=True, lse_base="ln")[1]
        torch.testing.assert_close(natural, results[0][1] * 0.6931472)


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_attributes_are_read_at_each_call(device, tensor_cores):
    """Check attributes that engines replace without a plan."""
    batch, other = decode_batch(device), decode_batch(device)
    pages, other_pages = batch.pages(8), other.pages(8)
    wrapper = planned(batch, pages, tensor_cores=tensor_cores)
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())
    wrapper._paged_kv_indices_buf = other_pages.indices
    close(wrapper.run(other.q, other.cache(other_pages), return_lse=True), other.expected())
    wrapper._paged_kv_indices_buf = pages.indices
    cache = batch.cache(pages)
    before = wrapper.run(batch.q, cache)
    wrapper._sm_scale = 0.01
    assert not torch.equal(wrapper.run(batch.q, cache), before)
    wrapper._sm_scale = None
    wrapper._window_left = 7
    assert not torch.equal(wrapper.run(batch.q, cache), before)
    wrapper._window_left = -1
    wrapper._float_workspace_buffer = workspace(device)
    assert torch.equal(wrapper.run(batch.q, cache), before)


def test_what_does_not_fit_is_refused_after_a_call_too(device):
    batch = decode_batch(device)
    pages = batch.pages(8)
    wrapper = planned(batch, pages)
    cache = batch.cache(pages, "NHD", "combined")
    wrapper.run(batch.q, cache)
    for q, given, options, text in (
        (batch.q[1:], cache, {}, "q must have .*, got 3 rows"),
        (batch.q[:, :2], cache, {}, "2 heads"),
        (batch.q.float(), cache, {}, "does not match the q_data_type"),
        (batch.q, cache[:, :, :4], {}, "as planned"),
        (batch.q, cache[:, 0], {}, "must "),
        (batch.q, cache, {"out": torch.empty_like(batch.q[1:])}, "Invalid shape of out"),
        (batch.q, cache, {"lse": torch.empty(2, device=device), "return_lse": True}, "Invalid shape of lse"),
        (batch.q, cache, {"window_left": 5}, "window_left"),
    ):
        with pytest.raises(Exception, match=text):
            wrapper.run(q, given, **options)
        assert wrapper.run(batch.q, cache).shape == batch.q.shape
    with pytest.raises(KeyError):
        wrapper.run(batch.q, list(cache.unbind(1)))


def odd(x: torch.Tensor) -> torch.Tensor:
    """Copy the values into rows without alignment."""
    return torch.nn.functional.pad(x, (1, 2))[..., 1 : 1 + x.shape[-1]]


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_rows_out_of_line(device, tensor_cores):
    """Check misaligned rows: CUDA kernels read 16 bytes at a time, so such rows are copied first."""
    batch = decode_batch(device)
    pages = batch.pages(8)
    wrapper = planned(batch, pages, tensor_cores=tensor_cores)
    k, v = batch.cache(pages)
    out = odd(torch.empty_like(batch.q))
    for _ in range(2):
        close(wrapper.run(odd(batch.q), (odd(k), odd(v)), out=out, return_lse=True), batch.expected())
    close((out, wrapper.run(batch.q, (k, v), return_lse=True)[1]), batch.expected())
    one = Batch([1], [50], device=device)
    keys, values = (odd(x) for x in one.dense())
    got = flashinfer.single_prefill_with_kv_cache(odd(one.q), keys, values, return_lse=True)
    close(got, one.expected())
    got = flashinfer.single_decode_with_kv_cache(odd(one.q)[0], keys, values)
    torch.testing.assert_close(got.float(), one.expected()[0][0], rtol=2e-3, atol=2e-3)


def test_a_refused_launch_is_repeated_with_copies():
    """Check the retry with aligned copies, using a module that rejects misaligned tensors as a GPU does."""
    batch = decode_batch("cpu")
    pages = batch.pages(8)
    wrapper = planned(batch, pages)
    module = wrapper._cached_module

    class Strict:
        def __getattr__(self, name):
            def call(*args):
                tensors = [a for a in args if isinstance(a, torch.Tensor)]
                if any(call_records.aligned(t) is not t for t in tensors):
                    raise RuntimeError("batch_decode: CUDA error: misaligned address")
                return getattr(module, name)(*args)

            return call

    wrapper._cached_module = Strict()
    k, v = batch.cache(pages)
    out = odd(torch.empty_like(batch.q))
    _, lse = wrapper.run(odd(batch.q), (odd(k), odd(v)), out=out, return_lse=True)
    close((out, lse), batch.expected())


@pytest.mark.parametrize("state_class", [DecodeState, PrefillState, MLAState])
def test_state_compares_every_attribute(state_class):
    """Check that a change of any attribute that a record was built from is noticed, and that a new plan is taken."""

    class Wrapper:
        def __getattr__(self, name):
            value = self.__dict__[name] = object()
            return value

    wrapper = Wrapper()
    state = state_class.of(wrapper)
    names = list(vars(wrapper))
    assert len(names) == len(dataclasses.fields(state_class))
    assert state.has_plan_of(wrapper) and state.has_options_of(wrapper)
    for name in names:
        before = getattr(wrapper, name)
        setattr(wrapper, name, object())
        assert state.has_plan_of(wrapper) + state.has_options_of(wrapper) == 1, name
        if state.has_options_of(wrapper):
            state.take_plan(wrapper)
            assert state.has_plan_of(wrapper)
        else:
            setattr(wrapper, name, before)


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_plan_without_lengths(device, tensor_cores):
    """Check that pages on the host suffice for planning; only the device knows how full the last pages are."""
    batch = decode_batch(device, kv_lens=[1, 54, 97, 130, 700])
    pages = batch.pages(16)
    wrapper = planned(batch, pages, tensor_cores=tensor_cores)
    exact = wrapper._planned
    assert exact.kv_lens is not None
    wrapper._planned = exact.with_batch(exact.indptr, None)
    plan_work(wrapper)
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())
    wrapper.plan(pages.indptr.cpu(), pages.indices, pages.last_page_len, *batch.heads, 64, 16)
    assert (wrapper._planned.kv_lens is None) == (device == "cuda")
    close(wrapper.run(batch.q, batch.cache(pages), return_lse=True), batch.expected())
