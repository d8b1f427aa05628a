# SPDX-License-Identifier: Apache-2.0
"""Random batches through every attention call: lengths, groups, pages, layouts, masks, splits.

``FLASHINFER_TEST_ATTENTION_CASES`` is the number of cases per call; a GPU does thousands in a minute. Few modules are
used, because a module takes longer to build than all of its cases to run; other ones are in test_matrix.py.
"""

from __future__ import annotations

import os
from typing import Any, Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from . import calls
from .inputs import FORMS, LAYOUTS, Batch, strided
from .reference import Attention

#: dtype and head_dim for which modules are built.
MODULES = {
    "cpu": [(torch.float16, 80), (torch.bfloat16, 64)],
    "cuda": [(torch.float16, 64), (torch.float16, 80), (torch.bfloat16, 128), (torch.float16, 256)],
}
#: The same for calls whose kernels the modules of batch prefill have too.
FEWER_MODULES = {**MODULES, "cpu": [(torch.float16, 64)]}
CASES = {"cpu": 60, "cuda": 300}

lengths = st.one_of(st.integers(0, 9), st.integers(10, 150), st.sampled_from([63, 64, 65, 127, 128, 129, 257, 600]))
LONG = st.sampled_from([1000, 4097, 9001])  # long enough for many splits; the CPU does not split for occupancy
few_rows = st.one_of(st.integers(0, 5), st.integers(6, 40), st.sampled_from([63, 64, 65, 130]))


def keys(device: str) -> st.SearchStrategy[int]:
    return lengths if device == "cpu" else st.one_of(lengths, lengths, LONG)


def cases(device: str) -> int:
    return int(os.environ.get("FLASHINFER_TEST_ATTENTION_CASES", CASES[device]))


def draw_batch(
    draw: Callable[..., Any],
    device: str,
    qo_lens: list[int],
    kv_lens: list[int],
    modules: dict[str, list[tuple[torch.dtype, int]]] = MODULES,
) -> Batch:
    torch.manual_seed(draw(st.integers(0, 2**31), label="seed"))
    dtype, head_dim = draw(st.sampled_from(modules[device]), label="module")
    group, kv_heads = draw(st.integers(1, 16), label="group"), draw(st.integers(1, 3), label="kv heads")
    batch = Batch(qo_lens, kv_lens, group * kv_heads, kv_heads, head_dim, dtype=dtype, device=device)
    if draw(st.booleans(), label="gaps in q"):
        batch.q = strided(batch.q, 16)
    return batch


def draw_options(draw: Callable[..., Any], forms: list[str] = FORMS) -> dict[str, Any]:
    return {
        "layout": draw(st.sampled_from(LAYOUTS), label="layout"),
        "form": draw(st.sampled_from(forms), label="form"),
        "page_size": draw(st.sampled_from([1, 2, 3, 5, 8, 16, 17, 64]), label="page_size"),
    }


def draw_split(draw: Callable[..., Any], fixed: bool) -> dict[str, Any]:
    kinds = [{}, {"disable_split_kv": True}, *([{"fixed_split_size": n} for n in (1, 7, 64)] if fixed else [])]
    return draw(st.sampled_from(kinds), label="split")


def draw_window(draw: Callable[..., Any]) -> int:
    return draw(st.one_of(st.just(-1), st.integers(0, 140)), label="window_left")


def draw_what(draw: Callable[..., Any], batch: Batch) -> calls.What:
    """Draw plain, causal, masked or multi-item attention."""
    kind = draw(st.sampled_from(["plain", "causal", "causal", "mask", "items"]), label="kind")
    what = Attention(window_left=draw_window(draw), sm_scale=draw(st.sampled_from([None, 0.3]), label="sm_scale"))
    if kind == "mask":
        density = draw(st.sampled_from([0.02, 0.5, 0.98]), label="density")
        shapes = zip(batch.qo_lens, batch.kv_lens, strict=True)
        return [what.with_(mask=torch.rand(a, b, device=batch.device) < density) for a, b in shapes]
    if kind == "items" and all(a <= b for a, b in zip(batch.qo_lens, batch.kv_lens, strict=True)):
        each = []
        for kv_len in batch.kv_lens:
            prefix = draw(st.integers(0, kv_len), label="prefix")
            item = draw(st.integers(1, 20), label="item")
            each.append(what.with_(prefix_len=prefix, token_pos=torch.arange(kv_len - prefix + 1) % item))
        return each
    return what.with_(causal=kind == "causal")


def fuzz(test: Callable[..., None]) -> Callable[..., None]:
    """Run as many cases as requested on each device present."""

    def run(device: str) -> None:
        checks = settings(max_examples=cases(device), suppress_health_check=list(HealthCheck))
        checks(given(st.data())(lambda data: test(device, data.draw)))()

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@fuzz
def test_single_decode(device, draw):
    batch = draw_batch(draw, device, [1], [draw(keys(device), label="kv_len")], FEWER_MODULES)
    what = Attention(window_left=draw_window(draw))
    options = draw_options(draw)
    got = calls.single_decode(batch, what, tensor_cores=draw(st.booleans(), label="tensor cores"), **options)
    calls.check(got, batch.expected(what), batch.dtype)


@fuzz
def test_single_prefill(device, draw):
    lens = draw(few_rows, label="qo_len"), draw(keys(device), label="kv_len")
    batch = draw_batch(draw, device, [lens[0]], [lens[1]], FEWER_MODULES)
    what = draw_what(draw, batch)
    one = calls.first(what)
    one = one.with_(prefix_len=None, token_pos=None)  # this call has no multi-item scoring
    calls.check(calls.single_prefill(batch, one, **draw_options(draw)), batch.expected(one), batch.dtype)


@fuzz
def test_batch_decode(device, draw):
    kv_lens = draw(st.lists(keys(device), min_size=1, max_size=7), label="kv_lens")
    batch = draw_batch(draw, device, [1] * len(kv_lens), kv_lens, FEWER_MODULES)
    what = Attention(window_left=draw_window(draw))
    got = calls.batch_decode(batch, what, **draw_options(draw, FORMS[:2]), plan=draw_split(draw, fixed=False))
    calls.check(got, batch.expected(what), batch.dtype)


@fuzz
def test_tensor_core_decode(device, draw):
    kv_lens = draw(st.lists(keys(device), min_size=1, max_size=7), label="kv_lens")
    most = max(1, min(kv_lens))
    q_len = draw(st.integers(1, min(most, 5)), label="q_len_per_req")
    batch = draw_batch(draw, device, [q_len] * len(kv_lens), kv_lens)
    what = Attention(window_left=draw_window(draw), causal=q_len > 1)
    got = calls.tensor_core_decode(batch, what, **draw_options(draw), plan=draw_split(draw, fixed=True))
    calls.check(got, batch.expected(what), batch.dtype)


@fuzz
def test_paged_prefill(device, draw):
    requests = draw(st.lists(st.tuples(few_rows, keys(device)), min_size=1, max_size=5), label="requests")
    batch = draw_batch(draw, device, *(list(x) for x in zip(*requests, strict=True)))
    what = draw_what(draw, batch)
    got = calls.paged_prefill(batch, what, **draw_options(draw), plan=draw_split(draw, fixed=True))
    calls.check(got, batch.expected(what), batch.dtype)


@fuzz
def test_ragged_prefill(device, draw):
    requests = draw(st.lists(st.tuples(few_rows, keys(device)), min_size=1, max_size=5), label="requests")
    batch = draw_batch(draw, device, *(list(x) for x in zip(*requests, strict=True)))
    what = draw_what(draw, batch)
    got = calls.ragged_prefill(batch, what, **draw_options(draw), plan=draw_split(draw, fixed=True))
    calls.check(got, batch.expected(what), batch.dtype)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 32])
def test_every_group(device, group):
    """Check decode and prefill against the reference for group sizes that divide no tile."""
    for qo_lens, modules in (([1, 1], FEWER_MODULES), ([1, 19], MODULES)):
        dtype, head_dim = modules[device][0]
        batch = Batch(qo_lens, [33, 130], 2 * group, 2, head_dim, dtype=dtype, device=device)
        what = Attention(causal=True)
        call = calls.batch_decode if max(qo_lens) == 1 else calls.paged_prefill
        calls.check(call(batch, what, page_size=16), batch.expected(what), dtype)
