# SPDX-License-Identifier: Apache-2.0
"""Causal prefill whose queries see a range of keys on both sides too."""

from __future__ import annotations

import pytest
import torch

from flashinfer import BatchPrefillWithCausalBidirectionalRangesWrapper as Wrapper
from flashinfer.jit.attention import gen_batch_prefill_bidirectional_ranges_module

from ..tensors import randn
from .inputs import Pages, int32, offsets, to_layout
from .reference import Attention

F16, BF16 = torch.float16, torch.bfloat16
#: A prompt, the end of one, one token, none, and a prompt longer than two tiles of keys.
QO_LENS, KV_LENS = [9, 5, 1, 0, 150], [9, 31, 40, 3, 150]
HEADS, DIM, PAGE = (4, 2), 64, 8
TYPES = {"q_data_type": F16, "kv_data_type": F16}


def spans(qo_lens: list[int], kv_lens: list[int]) -> torch.Tensor:
    """Ranges of spans of five tokens, every second one, cut where the keys end; rows in between have none."""
    rows = []
    for qo_len, kv_len in zip(qo_lens, kv_lens, strict=True):
        for position in range(kv_len - qo_len, kv_len):
            begin = position // 5 * 5
            rows.append((begin, begin + 4) if begin % 10 else (-1, -1))
    return torch.tensor(rows, dtype=torch.int32)


def planned(device, pages: Pages, layout="NHD", **options) -> Wrapper:
    workspace = torch.empty(32 << 20, dtype=torch.uint8, device=device)
    wrapper = Wrapper(workspace, layout, **TYPES, head_dim_qk=DIM, head_dim_vo=DIM)
    wrapper.plan(int32(offsets(QO_LENS), device), *pages.table, *HEADS, DIM, PAGE, **TYPES, **options)
    return wrapper


def batch(device):
    q = randn(sum(QO_LENS), HEADS[0], DIM, dtype=F16, device=device)
    k, v = (randn(sum(KV_LENS), HEADS[1], DIM, dtype=F16, device=device) for _ in range(2))
    return q, k, v, Pages(KV_LENS, PAGE, device)


def expected(q, k, v, ranges, window_left):
    outs, rows, keys = [], offsets(QO_LENS), offsets(KV_LENS)
    for i, (qo_len, kv_len) in enumerate(zip(QO_LENS, KV_LENS, strict=True)):
        mine, its = slice(rows[i], rows[i + 1]), slice(keys[i], keys[i + 1])
        key, position = torch.arange(kv_len), torch.arange(kv_len - qo_len, kv_len)[:, None]
        first, last = ranges[mine].cpu().split(1, dim=1)
        mask = (key <= position) | ((first <= key) & (key <= last))
        if window_left >= 0:
            mask &= (key - position).abs() <= window_left
        outs.append(Attention(mask=mask.to(q.device))(q[mine], k[its], v[its]))
    return tuple(torch.cat(part) for part in zip(*outs, strict=True))


@pytest.mark.parametrize("layout, window_left", [("NHD", -1), ("HND", 3)])
def test_ranges(device, layout, window_left):
    q, k, v, pages = batch(device)
    ranges = spans(QO_LENS, KV_LENS).to(device)
    wrapper = planned(device, pages, layout, window_left=window_left)
    caches = tuple(to_layout(pages.scatter(x, "NHD"), layout) for x in (k, v))
    out, lse = wrapper.run(q, caches, ranges, return_lse=True)
    values, scores = expected(q, k, v, ranges, window_left)
    torch.testing.assert_close(out.float(), values, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, scores, rtol=2e-3, atol=2e-3)
    template = Wrapper.run._trace_template(self=wrapper, paged_kv_cache=caches)
    tables = dict(zip(("kv_indptr", "kv_indices", "kv_last_page_len"), pages.table, strict=True))
    tables |= {"qo_indptr": int32(offsets(QO_LENS), device), "window_left": window_left}
    clean = [cache.nan_to_num() for cache in caches]
    reference = template.reference(q, *clean, int(layout == "HND"), ranges, **tables)
    torch.testing.assert_close(out, reference, rtol=2e-3, atol=2e-3)


def test_no_range_is_causal_attention(device):
    q, k, v, pages = batch(device)
    wrapper = planned(device, pages)
    none = torch.full((len(q), 2), -1, dtype=torch.int32, device=device)
    out = wrapper.run(q, torch.stack([pages.scatter(x, "NHD") for x in (k, v)], 1), none, 0.3)  # sm_scale
    rows, keys = offsets(QO_LENS), offsets(KV_LENS)
    for i in range(len(QO_LENS)):
        mine, its = slice(rows[i], rows[i + 1]), slice(keys[i], keys[i + 1])
        causal = Attention(causal=True, sm_scale=0.3)(q[mine], k[its], v[its])[0]
        torch.testing.assert_close(out[mine].float(), causal, rtol=2e-3, atol=2e-3)


REFUSED = [
    ({"token_pos_in_items_ptr": torch.zeros(4)}, ValueError, "token_pos_in_items_ptr must be None"),
    ({"pos_encoding_mode": "ALIBI"}, NotImplementedError, "pos_encoding_mode must be 'NONE'"),
    ({"q_data_type": BF16}, ValueError, "q_data_type must be torch.float16"),
    ({"head_dim_vo": 128}, ValueError, "head_dim_vo must be 64"),
    ({"custom_mask": torch.ones(4, dtype=torch.bool)}, ValueError, "custom_mask must be None"),
    ({"prefix_len_ptr": torch.ones(4).int()}, ValueError, "prefix_len_ptr must be None"),
    ({"max_sequence_kv": 40}, ValueError, "max_sequence_kv must be None"),
    ({"logits_soft_cap": 3.0}, ValueError, "logits_soft_cap must be None"),
    ({"causal": False}, ValueError, "causal must be True"),
]


def test_refused_calls():
    workspace = torch.empty(32 << 20, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="pos_encoding_mode must be 'NONE'"):
        Wrapper(workspace, pos_encoding_mode="ROPE_LLAMA")
    q, k, v, pages = batch("cpu")
    wrapper = Wrapper(workspace, **TYPES, head_dim_qk=DIM, head_dim_vo=DIM)
    rows = int32(offsets(QO_LENS), "cpu")
    for options, kind, text in REFUSED:
        with pytest.raises(kind, match=text):
            wrapper.plan(rows, *pages.table, *HEADS, DIM, PAGE, **options)
    wrapper.plan(rows, *pages.table, *HEADS, DIM, PAGE)  # dtypes are those of the wrapper
    cache = torch.stack([pages.scatter(x, "NHD") for x in (k, v)], 1)
    ranges = spans(QO_LENS, KV_LENS)
    for wrong, text in ((ranges.long(), "must be int32"), (ranges[1:], r"must have shape \(165, 2\)")):
        with pytest.raises(ValueError, match=text):
            wrapper.run(q, cache, wrong)


def test_module():
    spec = gen_batch_prefill_bidirectional_ranges_module("fa2", F16, F16, F16, torch.int32, 64, 64, device="cpu")
    assert "bidirectional_ranges" in spec.name
