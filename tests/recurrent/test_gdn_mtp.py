# SPDX-License-Identifier: Apache-2.0
"""Several tokens of each sequence by the gated delta rule: verification, states per token, replay of drafts."""

from __future__ import annotations

import pytest
import torch

from flashinfer.recurrent.gdn_step import gated_delta_rule_mtp, gated_delta_rule_replayssm_commit
from flashinfer.trace.templates.recurrent import (
    gated_delta_rule_mtp_trace,
    gated_delta_rule_replayssm_commit_trace,
)

from ..bad_arguments import check_refused
from .gdn_inputs import BF16, FP32, ints, projections, states

TOLERANCE = {FP32: 2e-5, BF16: 8e-3}


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    limit = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=limit, atol=limit)


def check(kw: dict, pool: torch.Tensor, slots: torch.Tensor, **more) -> None:
    output, new, buffer = gated_delta_rule_mtp_trace.reference(
        **kw, initial_state=pool, initial_state_indices=slots, **more
    )
    got, returned = gated_delta_rule_mtp(**kw, initial_state=pool, initial_state_indices=slots, **more)
    assert returned is pool
    close(got, output)
    close(pool, new)
    if buffer is not None:
        close(more["intermediate_states_buffer"], buffer)


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("batch, tokens, pad", [(1, 2, 0), (3, 4, 64), (2, 11, 0), (36, 3, 0), (2, 4, 3)])
def test_states_after_each_token(device, batch, tokens, pad, state):
    kw, pool = projections(batch, tokens, device=device), states(batch + 2, dtype=state, device=device, pad=pad)
    slots = ints([batch + 1 - i for i in range(batch)], device=device)
    if batch == 3:
        slots[1] = -1
    buffer = torch.full((batch + 1, tokens + 1, 4, 128, 128), 7.0, device=device).to(state)
    before = pool.clone()
    check(kw, pool, slots, intermediate_states_buffer=buffer, disable_state_update=True)
    assert torch.equal(pool, before)
    assert bool((buffer[batch] == 7).all()) and bool((buffer[:, tokens] == 7).all())


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_last_states(device, index):
    kw = projections(3, 4, device=device)
    check(kw, states(5, device=device), ints([4, -1, 0], index, device=device), disable_state_update=False)
    targets = ints([1, 2, -1], index, device=device)
    slots = ints([4, 3, 0], index, device=device)
    check(kw, states(5, device=device), slots, disable_state_update=False, output_state_indices=targets)


def test_slots_of_tokens(device):
    kw, pool = projections(2, 3, device=device), states(9, device=device)
    slots = ints([[1, 2, 3], [4, -1, 6]], device=device)
    check(kw, pool, ints([1, 8], device=device), ssm_state_indices=slots, disable_state_update=False)


def test_outputs_of_skipped_rows_stay(device):
    kw, pool = projections(2, 3, device=device), states(2, device=device)
    output = torch.full((2, 3, 4, 128), 7.0, device=device, dtype=BF16)
    more = {"initial_state_indices": ints([-1, 1], device=device), "disable_state_update": True}
    gated_delta_rule_mtp(**kw, initial_state=pool, **more, output=output)
    assert bool((output[0] == 7).all()) and not bool((output[1] == 7).all())
    assert not gated_delta_rule_mtp(**kw, initial_state=pool, **more)[0][0].any()


def test_update_is_off_by_default(device, monkeypatch):
    monkeypatch.setattr("flashinfer.recurrent.gdn_step._warned", False)
    kw, pool = projections(1, 2, device=device), states(1, device=device)
    before = pool.clone()
    with pytest.warns(UserWarning, match="disable_state_update was not given"):
        gated_delta_rule_mtp(**kw, initial_state=pool, initial_state_indices=ints([0], device=device))
    assert torch.equal(pool, before)


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
def test_replay(device, state):
    """Accepted drafts of stored windows give the states that a pass over them gives."""
    tokens, pool = 4, states(5, dtype=state, device=device)
    kw, slots = projections(3, tokens, device=device), ints([4, -1, 2], device=device)
    windows = {
        "replayssm_rawv": torch.zeros(5, 4, tokens, 128, device=device, dtype=BF16),
        "replayssm_rawk": torch.zeros(5, 2, tokens, 128, device=device, dtype=BF16),
        "replayssm_g": torch.zeros(5, 4, tokens, device=device),
        "replayssm_beta": torch.zeros(5, 4, tokens, device=device),
    }
    more = {"initial_state": pool, "initial_state_indices": slots}
    gated_delta_rule_mtp(**kw, **more, disable_state_update=True, cache_replayssm=True, **windows)
    assert torch.equal(windows["replayssm_rawv"][4], kw["v"][0].transpose(0, 1))
    assert torch.equal(windows["replayssm_rawk"][2], kw["k"][2].transpose(0, 1))
    assert not windows["replayssm_g"][[0, 1, 3]].any()

    accepted, layers = ints([3, 2, 0], device=device), pool[None].clone()
    caches = [x[None] for x in windows.values()]
    tracked, steps = ints([0, 1, -1], device=device), ints([1, 1, 2], device=device)
    expected = gated_delta_rule_replayssm_commit_trace.reference(
        layers, *caches, slots, accepted, track_state_indices=tracked, track_steps=steps
    )
    gated_delta_rule_replayssm_commit(layers, *caches, slots, accepted, track_state_indices=tracked, track_steps=steps)
    close(layers, expected)
    assert torch.equal(layers[0, 2], pool[2])  # nothing of it was accepted
    first = {name: x[:1, :3] if x.ndim > 2 else x for name, x in kw.items()}
    gated_delta_rule_mtp(**first, initial_state=pool, initial_state_indices=slots[:1], disable_state_update=False)
    close(layers[0, 4], pool[4])


def test_refused(device):
    kw, pool = projections(2, 3, device=device), states(4, device=device)
    good = {**kw, "initial_state": pool, "initial_state_indices": ints([1, 2], device=device)}
    good["disable_state_update"] = False
    slots, buffer = ints([[0, 1, 2], [3, 2, 1]], device=device), torch.zeros(2, 3, 4, 128, 128, device=device)
    mtp = gated_delta_rule_mtp
    check_refused(mtp, "mutually exclusive", **good, ssm_state_indices=slots, intermediate_states_buffer=buffer)
    check_refused(mtp, "state writes", **{**good, "disable_state_update": True}, ssm_state_indices=slots)
    check_refused(mtp, "int32", **good, ssm_state_indices=slots.long())
    check_refused(mtp, "shape", **good, ssm_state_indices=slots[:, :2])
    check_refused(mtp, "at least 2 sequences of 3 tokens", **good, intermediate_states_buffer=buffer[:1])
    check_refused(
        mtp, "intermediate_states_buffer must be float32", **good, intermediate_states_buffer=buffer.bfloat16()
    )
    check_refused(mtp, "cache_replayssm needs disable_state_update=True", **good, cache_replayssm=True)
    check_refused(mtp, "replayssm_rawv must be given", **{**good, "disable_state_update": True}, cache_replayssm=True)
    one = {name: x[:, :1] if name in ("q", "k", "v", "a", "b") else x for name, x in good.items()}
    check_refused(mtp, "T >= 2", **one, ssm_state_indices=slots[:, :1])
    check_refused(mtp, "T >= 3", **{**one, "disable_state_update": True}, cache_replayssm=True)
