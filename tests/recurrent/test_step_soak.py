# SPDX-License-Identifier: Apache-2.0
"""Calls of the step kernels drawn at random: lengths, padding slots, layouts and types of states; no wrong row."""

from __future__ import annotations

import random

import pytest
import torch

from flashinfer.mamba import selective_state_update
from flashinfer.recurrent import recurrent_kda
from flashinfer.recurrent.gdn_step import gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp
from flashinfer.trace.templates import recurrent as templates
from flashinfer.trace.templates.recurrent_mamba import selective_state_update_trace

from .gdn_inputs import BF16, FP32, ints, projections, states
from .mamba_inputs import doubled, gap_is_untouched, pool, tokens, weights

CALLS = {"cpu": 3, "cuda": 40}  # calls of each kind


def wrong_rows(got: torch.Tensor, expected: torch.Tensor, limit: float) -> int:
    difference = (got.double() - expected.double()).abs()
    return int((~(difference <= limit * (1 + expected.double().abs()))).any(-1).sum())


def copy_of(states: torch.Tensor) -> torch.Tensor:
    """Copy a pool with what lies between its slots."""
    return states._base.clone().as_strided(states.shape, states.stride())


def drawn_slots(draw: random.Random, count: int, batch: int, pad: int) -> list[int]:
    """Different slots in no order, some of them padding."""
    found = draw.sample([slot for slot in range(count) if slot != pad], batch)
    return [pad if draw.random() < 0.2 else slot for slot in found]


def check_pool(after: torch.Tensor, before: torch.Tensor, expected: torch.Tensor, used: list[int], limit: float) -> int:
    """Count wrong rows of the slots that were written; the others must keep their bits."""
    others = sorted(set(range(len(before))) - set(used))
    assert torch.equal(after[others], before[others])
    return wrong_rows(after[used], expected[used], limit) if used else 0


def gdn_call(draw: random.Random, device: str) -> int:
    state, token_count = draw.choice((FP32, BF16)), draw.choice((1, 1, 1, 2, 4, 9))
    heads, group, value_dim = draw.choice((1, 2)), draw.choice((1, 2, 4)), draw.choice((8, 64, 128, 136))
    batch = draw.choice((1, 2, 5, 40 if token_count == 1 else 3))
    kw = projections(batch, token_count, heads, heads * group, 128, value_dim, device=device)
    before = states(batch + 2, heads * group, 128, value_dim, dtype=state, device=device, pad=draw.choice((0, 64, 3)))
    slots = drawn_slots(draw, batch + 2, batch, -1)
    after = copy_of(before)
    more = {"initial_state_indices": ints(slots, draw.choice((torch.int32, torch.int64)), device=device)}
    limit = 2e-5 if state is FP32 else 1e-2
    if token_count == 1:
        output, expected = templates.gated_delta_rule_decode_pretranspose_trace.reference(
            **kw, state=None, initial_state=before, **more
        )
        got = gated_delta_rule_decode_pretranspose(**kw, state=None, initial_state=after, **more)[0]
        bad = check_pool(after, before, expected, [slot for slot in slots if slot >= 0], limit)
    else:
        buffer = torch.zeros(batch, token_count, *before.shape[1:], dtype=state, device=device)
        more |= {"disable_state_update": True, "intermediate_states_buffer": buffer}
        output, _, each = templates.gated_delta_rule_mtp_trace.reference(**kw, initial_state=before, **more)
        got = gated_delta_rule_mtp(**kw, initial_state=after, **more)[0]
        assert torch.equal(after, before)
        bad = wrong_rows(buffer, each, limit)
    return bad + wrong_rows(got, output, 1e-2)


def kda_call(draw: random.Random, device: str) -> int:
    state, dim, heads = draw.choice((FP32, BF16)), draw.choice((64, 128)), draw.choice((1, 2))
    batch = draw.choice((1, 3, 70))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    kw = {name: randn(batch, 1, heads, dim).to(BF16) for name in ("q", "k", "v", "g")}
    kw |= {"beta": randn(batch, 1, heads).to(BF16), "A_log": randn(heads), "dt_bias": randn(heads * dim)}
    kw |= {"use_gate_in_kernel": True, "lower_bound": -5.0, "beta_is_logit": True}
    before = states(batch + 2, heads, dim, dim, dtype=state, device=device, pad=draw.choice((0, 64)))
    slots, after = drawn_slots(draw, batch + 2, batch, -1), copy_of(before)
    kw["ssm_state_indices"] = ints(slots, device=device)
    output, expected = templates.recurrent_kda_trace.reference(**kw, initial_state=before)
    got, _ = recurrent_kda(**kw, initial_state=after, output=torch.empty_like(kw["v"]))
    used = [slot for slot in slots if slot >= 0]
    return check_pool(after, before, expected, used, 2e-5 if state is FP32 else 1e-2) + wrong_rows(got, output, 1e-2)


def ssu_call(draw: random.Random, device: str) -> int:
    state, packed = draw.choice((FP32, BF16, torch.float16)), draw.random() < 0.4
    heads, dim, dstate = draw.choice((2, 8)), draw.choice((40, 64, 128)), draw.choice((64, 96, 128, 256))
    lengths = [draw.choice((0, 1, 1, 2, 5)) for _ in range(draw.choice((1, 4)))] if packed else []
    batch = len(lengths) if packed else draw.choice((1, 3, 70))
    lead = (sum(lengths),) if packed else (batch,)
    pad = draw.choice((-1, 0))
    before = pool(batch + 2, heads, dim, dstate, state, device, gap=64)
    given = tokens(lead, heads, dim, 2, dstate, device) | weights(heads, dim, dstate, device) | {"dt_softplus": True}
    slots = drawn_slots(draw, batch + 2, batch, pad)
    given |= {"pad_slot_id": pad, "state_batch_indices": ints(slots, device=device)}
    if packed:
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        given |= {"cu_seqlens": ints(ends, device=device), "cache_steps": max(1, *lengths)}
    wide = doubled(given)
    expected, new = selective_state_update_trace.reference(state=before.double(), **wide)
    after = copy_of(before)
    out = torch.empty_like(given["x"])
    selective_state_update(after, **given, out=out)
    assert gap_is_untouched(after)
    used = [slot for i, slot in enumerate(slots) if slot != pad and (not packed or lengths[i])]
    limit = {FP32: 2e-5, BF16: 6e-3, torch.float16: 8e-4}[state]
    return check_pool(after, before, new, used, limit) + wrong_rows(out, expected, 2e-2)


@pytest.mark.parametrize("call", [gdn_call, kda_call, ssu_call], ids=lambda call: call.__name__)
def test_no_wrong_row(device, call):
    draw = random.Random(call.__name__)
    assert sum(call(draw, device) for _ in range(CALLS[device])) == 0
