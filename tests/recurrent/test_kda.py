# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention token by token: decode, speculative decode, verification, and whole decode layers."""

from __future__ import annotations

import pytest
import torch

from flashinfer import kda_decode
from flashinfer.recurrent import fused_kda_decode, packed_fused_kda_decode, packed_kda_decode, recurrent_kda
from flashinfer.trace.templates import recurrent as templates

from ..bad_arguments import check_refused
from .gdn_inputs import BF16, FP32, ints, states
from .kda_inputs import GATES, inputs


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    limit = 2e-5 if got.dtype is FP32 else 8e-3
    torch.testing.assert_close(got, expected, rtol=limit, atol=limit)


def check(kw: dict, **more) -> None:
    output, new = templates.recurrent_kda_trace.reference(**kw, **more)
    got, final = recurrent_kda(**kw, **more)
    close(got, output)
    assert final is None
    if new is not None:
        close(more["initial_state"], new)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    "batch, tokens, heads, value_heads, dim",
    [(2, 1, 2, 2, 128), (70, 1, 2, 2, 64), (2, 5, 1, 2, 64), (1, 19, 2, 2, 128)],
)
def test_states_of_sequences(device, batch, tokens, heads, value_heads, dim, state, gate):
    kw = inputs(batch, tokens, heads, value_heads, dim, device=device)
    check(kw, initial_state=states(batch, value_heads, dim, dim, dtype=state, device=device), **GATES[gate])


def test_pool(device):
    kw = inputs(3, 1, device=device)
    pool = states(6, 2, dtype=BF16, device=device, pad=64)
    check(kw, initial_state=pool, ssm_state_indices=ints([4, -1, 0], device=device), **GATES["bounded"])


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_packed_sequences(device, index):
    kw, offsets = inputs(1, 9, device=device), ints([0, 4, 4, 5, 9], index, device=device)
    check(kw, initial_state=states(4, 2, device=device), cu_seqlens=offsets, **GATES["softplus"])


def test_without_states(device):
    kw = inputs(2, 3, device=device)
    output, _ = templates.recurrent_kda_trace.reference(**kw, initial_state=torch.zeros(2, 2, 128, 128, device=device))
    got, final = recurrent_kda(**kw, output_final_state=True)
    close(got, output)
    assert final.dtype is FP32 and final.any()
    assert recurrent_kda(**kw)[1] is None


@pytest.mark.parametrize("is_packed", [False, True])
def test_speculative_decode(device, is_packed):
    kw, pool = inputs(3, 3, device=device), states(11, 2, dtype=BF16, device=device)
    slots = ints([[1, 2, 3], [-1, -1, -1], [6, 7, 8]], device=device)
    more = {"ssm_state_indices": slots, "num_accepted_tokens": ints([2, 1, 0], device=device)}
    if is_packed:
        kw = {name: x.flatten(0, 1)[None] if x.ndim > 2 else x for name, x in kw.items()}
        more["cu_seqlens"] = ints([0, 3, 6, 9], device=device)
    output, new = templates.recurrent_kda_trace.reference(**kw, initial_state=pool, **more)
    got, _ = recurrent_kda(**kw, initial_state=pool, num_spec_tokens=2, **more)
    close(got, output)
    close(pool, new)


def test_other_states_to_begin_from(device):
    kw, pool, source = inputs(2, 2, device=device), states(6, 2, device=device), states(3, 2, device=device)
    slots = ints([[1, 2], [4, 5]], device=device)
    start = source[[2, 0]]
    expected, after = templates.recurrent_kda_trace.reference(**kw, initial_state=start)
    begin = {"initial_state_source": source, "initial_state_indices": ints([2, 0], device=device)}
    got, _ = recurrent_kda(**kw, initial_state=pool, ssm_state_indices=slots, num_spec_tokens=1, **begin)
    close(got, expected)
    close(pool[[2, 5]], after)


def test_frozen_verification(device):
    """Stored keys, gates and corrections rebuild the state: S <- diag(e^g) S + k u^T."""
    kw, pool = inputs(2, 4, 2, 2, 64, device=device), states(3, 2, 64, 64, device=device)
    kw["v"], before = kw["v"][..., :64], pool.clone()
    corrections = torch.zeros(3, 2, 4, 64, device=device)
    kept = torch.zeros(3, 2, 4, 128, device=device, dtype=BF16)
    more = {"initial_state": pool, "ssm_state_indices": ints([2, 0], device=device), "disable_state_update": True}
    expected, _ = templates.recurrent_kda_trace.reference(**kw, **more)
    got, final = recurrent_kda(**kw, **more, correction_cache=corrections, kg_cache=kept)
    close(got, expected)
    assert final is None and torch.equal(pool, before) and not corrections[1].any()
    assert torch.equal(kept[2, :, :, :64], kw["k"][0].transpose(0, 1))
    assert torch.equal(kept[0, :, :, 64:], kw["g"][1].transpose(0, 1))
    k = torch.nn.functional.normalize(kept[2, :, :, :64].float(), dim=-1)
    rebuilt = before[2].clone()
    for t in range(4):
        rebuilt = rebuilt * kept[2, :, t, None, 64:].float().exp() + corrections[2, :, t, :, None] * k[:, t, None, :]
    recurrent_kda(**kw, initial_state=pool, ssm_state_indices=more["ssm_state_indices"])
    torch.testing.assert_close(pool[2], rebuilt, rtol=1e-4, atol=1e-4)


def test_checkpoints(device):
    """States before tokens 0, 32, 64 of each sequence; with rows of a pool those after 32, 64."""
    kw = inputs(1, 100, 1, 1, 64, device=device)
    offsets, start = ints([0, 70, 100], device=device), states(2, 1, 64, 64, device=device)
    kept, pool = torch.zeros(4, 1, 64, 64, device=device), torch.zeros(5, 1, 64, 64, device=device)
    more = {"cu_seqlens": offsets, "checkpoint_every_n_tokens": 32}
    *_, returned = recurrent_kda(
        **kw,
        initial_state=start.clone(),
        **more,
        state_checkpoints=kept,
        checkpoint_cu_starts=ints([0, 3], device=device),
    )
    assert returned is kept
    rows = ints([4, 1], device=device)
    recurrent_kda(
        **kw, initial_state=start.clone(), **more, state_checkpoints=pool, checkpoint_state_indices=rows,
        checkpoint_cu_starts=ints([0, 2], device=device),
    )  # fmt: skip
    assert torch.equal(kept[0], start[0]) and torch.equal(kept[3], start[1])
    for j, tokens in enumerate((32, 64)):
        prefix = {name: x[:, :tokens] if x.ndim > 2 else x for name, x in kw.items()}
        state = start[:1].clone()
        recurrent_kda(**prefix, initial_state=state)
        close(kept[j + 1], state[0])
        close(pool[[4, 1][j]], state[0])
    assert not pool[[0, 2, 3]].any()


def test_packed_decode(device):
    mixed, gate = torch.randn(3, 4608, device=device).to(BF16), torch.randn(3, 1536, device=device).to(BF16)
    beta, A_log, bias = (
        torch.randn(3, 12, device=device).to(BF16),
        torch.randn(12, device=device),
        torch.randn(1536, device=device),
    )
    pool, slots = states(4, 12, dtype=BF16, device=device), ints([3, -1, 0], device=device)
    output, new = templates.packed_kda_decode_trace.reference(mixed, gate, beta, A_log, bias, pool, slots)
    close(packed_kda_decode(mixed, gate, beta, A_log, bias, pool, slots), output)
    close(pool, new)


def layer(tokens: int, window: int, slots: int, device: str, heads: int = 2) -> dict:
    width = heads * 128

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    return {
        "x": randn(tokens, 3 * width).to(BF16),
        "weight": randn(3, 4, width),
        "conv_state": randn(slots, 3 * width, window).to(BF16),
        "raw_gate": randn(tokens, width).to(BF16),
        "raw_beta": randn(tokens, heads).to(BF16),
        "A_log": randn(heads),
        "dt_bias": randn(width),
        "state": states(slots, heads, dtype=BF16, device=device),
        "output_gate": randn(tokens, width).to(BF16),
        "norm_weight": randn(128).to(BF16),
    }


def check_layer(function, template, kw: dict) -> torch.Tensor:
    output, window, state = template.reference(**kw)
    got = function(**kw)
    torch.testing.assert_close(got, output, rtol=2e-2, atol=2e-2)
    assert torch.equal(kw["conv_state"], window)
    torch.testing.assert_close(kw["state"], state, rtol=2e-2, atol=2e-2)
    return got


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_decode_layer(device, lower_bound):
    kw = {**layer(4, 3, 5, device), "state_indices": ints([2, 0, -1, 4], device=device), "lower_bound": lower_bound}
    got = check_layer(fused_kda_decode, templates.fused_kda_decode_trace, kw)
    assert not got[1:3].any()


def test_packed_decode_layer(device):
    kw = layer(6, 5, 9, device)
    kw["state_indices"] = ints([[1, 2, 3], [0, 0, 0], [4, 5, 6]], device=device)
    kw |= {"query_start_loc": ints([0, 3, 4, 6], device=device), "num_accepted_tokens": ints([2, 1, 3], device=device)}
    check_layer(packed_fused_kda_decode, templates.packed_fused_kda_decode_trace, kw)


def test_decode_form(device):
    kw, state = inputs(2, 1, device=device), states(2, 2, device=device)
    expected, _ = recurrent_kda(**kw, initial_state=state.clone())
    with pytest.warns(DeprecationWarning):
        got, _ = kda_decode.recurrent_kda(**kw, initial_state=state)
    assert torch.equal(got, expected)


def test_refused(device):
    kw, pool = inputs(2, 2, device=device), states(6, 2, device=device)
    slots = ints([[0, 1], [2, 3]], device=device)
    good = {**kw, "initial_state": pool, "ssm_state_indices": slots, "num_spec_tokens": 1}
    check_refused(recurrent_kda, "num_spec_tokens must be >= 1", **{**good, "num_spec_tokens": 0})
    check_refused(recurrent_kda, "ssm_state_indices is required", **{**good, "ssm_state_indices": None})
    check_refused(recurrent_kda, "2D", **{**good, "ssm_state_indices": slots[0]})
    check_refused(recurrent_kda, "must equal 1+num_spec_tokens", **{**good, "num_spec_tokens": 2})
    check_refused(recurrent_kda, "shape[0]", **{**good, "ssm_state_indices": slots[:1]})
    check_refused(recurrent_kda, "backend must be one of", **good, backend="triton")
    frozen = {**kw, "initial_state": pool, "disable_state_update": True, "ssm_state_indices": slots[0]}
    check_refused(recurrent_kda, "output_final_state must be False", **frozen, output_final_state=True)
    more = {"num_accepted_tokens": slots[0], "num_spec_tokens": 1, "ssm_state_indices": slots}
    check_refused(recurrent_kda, "num_accepted_tokens must be None", **{**frozen, **more})
    cache = torch.zeros(6, 2, 2, 128, device=device)
    check_refused(recurrent_kda, "correction_cache needs disable_state_update", **kw, correction_cache=cache)
    check_refused(recurrent_kda, "checkpoint_every_n_tokens must be a multiple", **kw, checkpoint_every_n_tokens=33)
    check_refused(recurrent_kda, "A_log must have 2 elements", **{**kw, "A_log": kw["A_log"][:1]})
    check_refused(recurrent_kda, "q must be bfloat16", **{**kw, "q": kw["q"].half()})
