# SPDX-License-Identifier: Apache-2.0
"""Draws of the three steps of sparse attention: scores, selection and attention, each compared with float64 or exactly.

``FLASHINFER_TEST_CALLS=100000 pytest tests/indexer/test_soak.py -s`` draws as many as of all families
(tests/guard_pages.py); without it, a few seconds' worth. The rows that were compared are printed.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import ArgumentError
from flashinfer.indexer import fp8_paged_mqa_logits, fp8_ragged_mqa_logits

from ..mla import sparse_calls
from . import paged, ragged

SHARE = 0.006  #: share of the calls of all families
COUNT = max(round(SHARE * int(os.environ.get("FLASHINFER_TEST_CALLS") or 2000)), 1)
SEED = random.SystemRandom().randrange(1 << 32) if os.environ.get("FLASHINFER_TEST_RANDOM") else 0


def draw_length(draw: random.Random) -> int:
    """Lengths around ends of pages and splits, and any."""
    return draw.choice((0, 1, 63, 64, 65, 255, 256, 257, draw.randrange(700), draw.randrange(2000)))


def draw_scores(draw: random.Random, device: str) -> dict[str, Any]:
    heads, dim, next_n = draw.choice(((64, 128, 1), (64, 128, 2), (8, 256, 1), (8, 256, 2), (12, 64, 2), (32, 128, 3)))
    lengths = [draw_length(draw) for _ in range(draw.randint(1, 4))]
    lengths = [0 if n == 0 else max(n, next_n) for n in lengths]
    page = draw.choice((32, 64, 128))
    axes = {"num_heads": heads, "head_dim": dim, "next_n": next_n, "block_size": page, "seed": draw.randrange(1 << 30)}
    made = paged.make(device, lengths, **axes)
    kind = draw.randrange(4)
    if kind == 1:  # scores of one sign
        made["weights"] = made["weights"].abs() * draw.choice((-1, 1))
    elif kind == 2:  # one large product beside many small ones, with which products on Hopper lose most bits
        made["q"].view(torch.uint8)[..., 0] = 0x7E
    elif kind == 3:  # equal scores, which the selection has to choose among
        made["q"] = made["q"][:1].expand(made["q"].shape).contiguous()
        made["kv_fused"] = made["kv_fused"][:1].expand(made["kv_fused"].shape).contiguous()
    return made


def check_selection(logits: torch.Tensor, limits: torch.Tensor, found: torch.Tensor, k: int) -> None:
    """Check that a row's choices are different columns whose scores are the largest; -1 follows them."""
    for row, length in enumerate(limits.tolist()):
        count = min(length, k)
        chosen = found[row, :count].long()
        assert bool((found[row, count:] == -1).all()), "what is left must be -1"
        assert count == 0 or (int(chosen.min()) >= 0 and int(chosen.max()) < length)
        assert len(chosen.unique()) == count
        expected = logits[row, :length].topk(count).values.sort().values
        assert torch.equal(logits[row, chosen].sort().values, expected)


@pytest.fixture(scope="module")
def counts():
    rows = {"scores": 0, "ragged scores": 0, "selections": 0, "attention": 0}
    yield rows
    print("\nrows compared:", ", ".join(f"{name} {count}" for name, count in rows.items()))


@pytest.mark.parametrize("number", range(COUNT))
def test_steps(device, number, counts):
    """Score cached keys, select the best, attend to them: lists as they come, shuffled, with holes and repetitions."""
    draw = random.Random(SEED + number)
    made = draw_scores(draw, device)
    logits, limits = fp8_paged_mqa_logits(**made), paged.limits(made)
    paged.check(made, logits, whole=2e-2)  # inputs that lose most bits on Hopper are among these
    counts["scores"] += len(logits)
    batch, next_n = made["q"].shape[:2]
    k, page = draw.choice((1, 8, 64, 300)), made["kv_fused"].shape[1]
    if logits.shape[1] == 0:
        return
    requests = torch.arange(batch, device=device).repeat_interleave(next_n).int()
    places = torch.empty(len(logits), k, dtype=torch.int32, device=device)
    indices = flashinfer.top_k_page_table_transform(
        logits, made["block_tables"], limits.int(), k, row_to_batch=requests, page_size=page, out_raw_indices=places
    )
    check_selection(logits, limits, places, k)
    tables = made["block_tables"][requests.long()]
    rows = tables.gather(1, (places.clamp_min(0) // page).long()) * page + places.clamp_min(0) % page
    assert torch.equal(indices, torch.where(places < 0, -1, rows))
    counts["selections"] += len(logits)

    kind, dim = draw.choice(
        ((torch.bfloat16, 576), (torch.bfloat16, 512), (torch.float8_e4m3fn, 576), (torch.uint8, 576))
    )
    call = sparse_calls.make(
        device, len(logits), draw.choice((5, 16, 64)), k, kind, dim, len(made["kv_fused"]), page,
        seed=draw.randrange(1 << 30), with_lengths=draw.random() < 0.5, with_sinks=draw.random() < 0.5,
    )  # fmt: skip
    order = torch.rand(k).argsort().to(device)
    call["indices"] = indices if draw.random() < 0.3 else torch.where(call["indices"] < 0, -1, indices[:, order])
    if draw.random() < 0.3:
        call["indices"] = call["indices"][:, order // 2].contiguous()  # each of a half occurs twice
    out, lse = flashinfer.sparse_mla(**call, return_lse=True)
    counts["attention"] += sparse_calls.check(call, out, lse)
    check_outside(draw, call, out)


def check_outside(draw: random.Random, call: dict[str, Any], out: torch.Tensor) -> None:
    """An index out of range is an error on the CPU; on CUDA it names no row."""
    row, column = draw.randrange(call["indices"].shape[0]), draw.randrange(call["indices"].shape[1])
    outside = {**call, "indices": call["indices"].clone(), "lengths": None}
    rows = call["kv_cache"].shape[0] * call["kv_cache"].shape[1]
    outside["indices"][row, column] = draw.choice((-2, -(1 << 31), rows, (1 << 31) - 1))
    if not out.is_cuda:
        with pytest.raises(ArgumentError, match=rf"indices\[{row}, {column}\] must be -1"):
            flashinfer.sparse_mla(**outside)
        return
    none = {**outside, "indices": outside["indices"].clone()}
    none["indices"][row, column] = -1
    assert torch.equal(flashinfer.sparse_mla(**outside), flashinfer.sparse_mla(**none))


@pytest.mark.parametrize("number", range(COUNT))
def test_ragged_steps(device, number, counts):
    """Score ragged keys, and select within the ranges of the tokens."""
    draw = random.Random(SEED + (1 << 20) + number)
    keys, tokens = draw.randint(1, 700), draw.randint(1, 20)
    starts = [draw.randrange(keys) for _ in range(tokens)]
    ends = [min(start + draw.choice((0, 1, 64, draw.randrange(700))), keys) for start in starts]
    made = ragged.make(device, starts, ends, keys, *draw.choice(((64, 128), (8, 256), (12, 96), (4, 32))))
    logits = fp8_ragged_mqa_logits(**made)
    ragged.check(made, logits)
    counts["ragged scores"] += tokens
    k, limits = draw.choice((1, 16, 300)), made["k_ends"] - made["k_starts"]
    offsets = torch.zeros_like(limits)
    found = flashinfer.top_k_ragged_transform(logits, offsets, limits, k, row_starts=made["k_starts"])
    windows = torch.full((tokens, keys), -torch.inf, device=device)
    for t, (start, end) in enumerate(zip(starts, ends, strict=True)):
        windows[t, : end - start] = logits[t, start:end]
    check_selection(windows, limits, found, k)
    counts["selections"] += tokens
