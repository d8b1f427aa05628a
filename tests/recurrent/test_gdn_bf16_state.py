# SPDX-License-Identifier: Apache-2.0
"""Pools of bfloat16 states: the forms that advance a state by accepted drafts, and rings of corrections."""

from __future__ import annotations

import pytest
import torch

from flashinfer.gdn_kernels import gdn_decode_bf16_state as bf16_state
from flashinfer.gdn_kernels import gdn_decode_bf16_wy_output_only as output_only
from flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache import gated_delta_rule_mtp_ucache
from flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache_flush import gated_delta_rule_mtp_ucache_flush
from flashinfer.trace.templates import recurrent as templates

from ..bad_arguments import check_refused
from .gdn_inputs import BF16, FP16, ints, projections, states


def close(got: torch.Tensor, expected: torch.Tensor, limit: float = 8e-3) -> None:
    torch.testing.assert_close(got.float(), expected.float(), rtol=limit, atol=limit)


def check(kw: dict, pool: torch.Tensor, slots: torch.Tensor, first: int = 0, **more) -> None:
    """Compare outputs from token ``first`` on, and the pool."""
    call = {**kw, "initial_state_source": pool, "initial_state_indices": slots, **more}
    output, new = templates.bf16_gated_delta_rule_mtp_trace.reference(**call)
    got = bf16_state.gated_delta_rule_mtp(**call)
    if got is not None:
        close(got[:, first:], output[:, first:])
    close(pool, new)


def test_one_token(device):
    kw, pool = projections(3, 1, device=device), states(5, dtype=BF16, device=device)
    slots, targets = ints([4, -1, 0], device=device), ints([1, 2, 0], device=device)
    for function in (bf16_state.gated_delta_rule, bf16_state.gated_delta_rule_t1_wide_vec):
        call = {**kw, "initial_state_source": pool, "initial_state_indices": slots, "output_state_indices": targets}
        call |= {"softplus_beta": 2.0, "softplus_threshold": 1.0}
        output, new = templates.bf16_gated_delta_rule_trace.reference(**call)
        close(function(**call), output)
        close(pool, new)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_several_tokens(device, is_frozen):
    kw, pool = projections(2, 4, device=device), states(3, dtype=BF16, device=device)
    check(kw, pool, ints([2, 0], device=device), disable_state_update=is_frozen)


def test_accepted_drafts(device):
    kw, slots, accepted = (
        projections(3, 4, device=device),
        ints([2, 0, 3], device=device),
        ints([0, 3, 1], device=device),
    )
    check(kw, states(4, dtype=BF16, device=device), slots, 4, accepted_steps=accepted, disable_output=True)
    check(kw, states(4, dtype=BF16, device=device), slots, 3, accepted_steps=ints([0, 2, 1], device=device))
    check(kw, states(4, dtype=BF16, device=device), slots, 2, recovery_steps=2)


def test_slots_of_tokens(device):
    kw, slots = projections(2, 3, device=device), ints([0, 1], device=device)
    tokens, more = ints([[2, 3, 4], [5, 6, 7]], device=device), {"accepted_steps": ints([1, 2], device=device)}
    check(kw, states(10, dtype=BF16, device=device), slots, ssm_state_indices=tokens)
    check(kw, states(10, dtype=BF16, device=device), slots, 2, ssm_state_indices=tokens, **more)
    targets = ints([8, 9], device=device)
    check(kw, states(10, dtype=BF16, device=device), slots, ssm_state_indices=tokens, output_state_indices=targets)


def test_outputs_only(device):
    kw, pool = projections(2, 4, device=device), states(3, dtype=BF16, device=device)
    call, before = (
        {**kw, "initial_state_source": pool, "initial_state_indices": ints([2, 0], device=device)},
        pool.clone(),
    )
    got = output_only.gated_delta_rule_mtp(**call)
    close(got, templates.bf16_gated_delta_rule_mtp_trace.reference(**call)[0])
    assert torch.equal(pool, before)


def rings(rows: int, device: str, dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    """Return rings of five slots with plausible contents: normalised keys, log decays that fall."""
    k = torch.nn.functional.normalize(torch.randn(5, 2, rows, 128, device=device), dim=-1)
    g = -torch.rand(5, 4, rows, device=device).cumsum(-1)
    return {"k_cache": k.to(dtype), "u_cache": torch.randn(5, 4, rows, 128, device=device).to(dtype), "g_cache": g}


@pytest.mark.parametrize("dtype, state", [(BF16, BF16), (FP16, FP16), (BF16, FP16)], ids=str)
@pytest.mark.parametrize("tokens", [4, 8])
def test_ring(device, tokens, dtype, state):
    kw, pool = projections(4, tokens, dtype=dtype, device=device), states(5, dtype=state, device=device)
    ring, slots = rings(32, device, dtype), ints([3, 0, -1, 1], device=device)
    lengths, bases = ints([16 - tokens + 1, 0, 5, 3], device=device), ints([28, 7, 1, 30], device=device)
    call = {**kw, "initial_state_source": pool, "initial_state_indices": slots, **ring}
    call |= {"hist_len": lengths, "cache_base": bases}
    expected = templates.gated_delta_rule_mtp_ucache_flush_trace.reference(**call)
    got = gated_delta_rule_mtp_ucache_flush(**call)
    close(got, expected[0])
    for name, value in zip(("initial_state_source", "k_cache", "u_cache", "g_cache"), expected[1:], strict=True):
        close(call[name], value, 2e-2)
    assert lengths.tolist() == [0, 0, 5, 3] and bases.tolist() == [(28 + 16 - tokens + 1) % 32, 7, 1, 30]


def test_flat_ring(device):
    kw, pool = projections(3, 4, device=device), states(5, dtype=BF16, device=device)
    ring, before = rings(16, device), pool.clone()
    call = {**kw, "initial_state_source": pool, "initial_state_indices": ints([3, 0, 1], device=device), **ring}
    call["hist_len"] = ints([12, 0, 7], device=device)
    expected = templates.gated_delta_rule_mtp_ucache_trace.reference(**call)
    close(gated_delta_rule_mtp_ucache(**call), expected[0])
    for name, value in zip(("k_cache", "u_cache", "g_cache"), expected[2:], strict=True):
        close(call[name], value, 2e-2)
    assert torch.equal(pool, before)


def test_refused(device):
    kw, pool = projections(2, 4, device=device), states(5, dtype=BF16, device=device)
    slots = ints([1, 2], device=device)
    good = {**kw, "initial_state_source": pool, "initial_state_indices": slots}
    mtp = bf16_state.gated_delta_rule_mtp
    check_refused(mtp, "must be a bfloat16 tensor", **{**good, "initial_state_source": pool.float()})
    tokens = ints([[0, 1, 2, 3], [4, 3, 2, 1]], device=device)
    check_refused(mtp, "not yet supported", **good, ssm_state_indices=tokens, recovery_steps=1)
    buffer = torch.zeros(3, 4, 4, 128, 128, device=device, dtype=BF16)
    check_refused(mtp, "intermediate_states_buffer.shape[0] must be 2", **good, intermediate_states_buffer=buffer)
    with pytest.raises(ValueError, match="tile_v must be 32, 64 or 128"):
        bf16_state.gated_delta_rule_mtp_wide_vec(**good, tile_v=16)

    flush = gated_delta_rule_mtp_ucache_flush
    ring = {**good, **rings(32, device), "hist_len": ints([3, 0], device=device)}
    check_refused(flush, "caller-owned cache_base", **ring)
    ring["cache_base"] = ints([0, 1], device=device)
    check_refused(flush, "hist_len out of legal range", **{**ring, "hist_len": ints([17, 0], device=device)})
    check_refused(flush, "cache_base out of legal range", **{**ring, "cache_base": ints([0, 32], device=device)})
    wide = ints([[0, 1], [1, 2]], device=device)
    check_refused(flush, "contiguous", **{**ring, "cache_base": wide[:, 0]})
    with pytest.raises(NotImplementedError, match="accepted_steps is not supported"):
        flush(**ring, accepted_steps=slots)
    half = projections(2, 4, dtype=FP16, device=device)
    flat = {**good, **rings(16, device), "hist_len": ints([3, 0], device=device), **half}
    check_refused(gated_delta_rule_mtp_ucache, "bf16-only", **flat)
