# SPDX-License-Identifier: Apache-2.0
"""Decode of the gated delta rule, in both layouts of states."""

from __future__ import annotations

import pytest
import torch

from flashinfer.recurrent.gdn_step import gated_delta_rule_decode, gated_delta_rule_decode_pretranspose
from flashinfer.trace.templates.recurrent import (
    gated_delta_rule_decode_pretranspose_trace,
    gated_delta_rule_decode_trace,
)

from ..bad_arguments import check_refused
from .gdn_inputs import BF16, FP16, FP32, ints, projections, states

TOLERANCE = {FP32: 1e-5, BF16: 8e-3, FP16: 2e-3}
STEP, K_MAJOR = gated_delta_rule_decode_pretranspose, gated_delta_rule_decode


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    limit = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=limit, atol=limit)


def check(kw: dict, **more) -> torch.Tensor:
    """Compare a call with the reference: outputs, and every bit of the states that it must leave alone."""
    pool = more.get("initial_state", kw.get("state"))
    before = pool.clone()
    output, new = gated_delta_rule_decode_pretranspose_trace.reference(**{"state": None, **kw}, **more)
    got, state = STEP(**{"state": None, **kw}, **more)
    assert state is pool
    close(got, output.to(got.dtype))
    close(pool, new)
    untouched = (before == new).flatten(1).all(1)
    assert torch.equal(pool[untouched], before[untouched])
    return got


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("batch, heads, value_heads", [(1, 1, 1), (3, 2, 4), (40, 2, 6)])
def test_states_of_sequences(device, batch, heads, value_heads, state):
    kw = projections(batch, 1, heads, value_heads, device=device)
    check({**kw, "state": states(batch, value_heads, dtype=state, device=device)})


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("key_dim, value_dim", [(128, 136), (128, 256), (256, 128)])
def test_dimensions(device, key_dim, value_dim, dtype):
    kw = projections(2, 1, 1, 2, key_dim, value_dim, dtype=dtype, device=device)
    check({**kw, "state": states(2, 2, key_dim, value_dim, device=device)})


def test_float32(device):
    """The CPU computes float32, in which models are compared; a GPU says that it does not."""
    kw = {**projections(2, 1, 1, 2, dtype=FP32, device=device), "state": states(2, 2, device=device)}
    if device == "cuda":
        check_refused(STEP, "q must be float16 or bfloat16", **kw)
    else:
        assert check(kw).dtype is FP32


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
def test_tokens_of_a_wider_matrix(device, state):
    """Rows of q, k and v that begin at multiples of 8 bytes only, as parts of a matrix of all projections."""
    kw = projections(3, 1, device=device)
    for name in ("q", "k", "v"):
        row = kw[name].flatten(1)
        kw[name] = torch.cat([row[:, :4], row], 1)[:, 4:].view(kw[name].shape)
    check({**kw, "state": states(3, dtype=state, device=device)})


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("pad", [0, 64, 3])  # three elements: vectors of 16 bytes do not fit
def test_pool(device, pad, state, index):
    kw = projections(4, 1, device=device)
    pool = states(7, dtype=state, device=device, pad=pad)
    got = check(kw, initial_state=pool, initial_state_indices=ints([5, -1, 0, 3], index, device=device))
    assert not got[1].any()


def test_other_slots_are_written(device):
    pool, kw = states(6, device=device), projections(3, 1, device=device)
    slots = ints([4, 0, 2], device=device)
    check(kw, initial_state=pool, initial_state_indices=slots, output_state_indices=ints([1, -1, 2], device=device))


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
def test_several_tokens(device, state):
    kw = projections(2, 5, device=device)
    check({**kw, "state": states(2, dtype=state, device=device)})
    pool, buffer = states(4, dtype=state, device=device), torch.zeros(2, 5, 4, 128, 128, device=device, dtype=state)
    before, slots = pool.clone(), ints([3, 1], device=device)
    more = {"initial_state": pool, "initial_state_indices": slots, "disable_state_update": True}
    check(kw, **more)
    STEP(**{"state": None, **kw}, **more, intermediate_states_buffer=buffer)
    assert torch.equal(pool, before) and buffer.any()


def test_options(device):
    kw = projections(2, 1, dtype=FP16, device=device)
    kw["dt_bias"] = kw["dt_bias"].bfloat16()
    output = torch.empty(2, 1, 4, 128, device=device)
    state = states(2, device=device)
    expected, _ = gated_delta_rule_decode_pretranspose_trace.reference(
        **{name: x.double() if name in "qk" else x for name, x in kw.items()}, state=state, scale=0.3,
        use_qk_l2norm=False,
    )  # fmt: skip
    got, _ = STEP(**kw, state=state, scale=0.3, use_qk_l2norm=False, output=output)
    assert got is output
    torch.testing.assert_close(output, expected.float(), rtol=1e-4, atol=1e-4)


def test_parts_of_a_projection(device):
    """Heads of q, k, v that lie side by side, and gates that are columns of one matrix."""
    kw = projections(3, 1, device=device)
    mixed = torch.cat([kw[name].flatten(1) for name in "qkv"], 1)[:, None]
    gates = torch.cat([kw["a"], kw["b"]], 2)
    views = {"q": mixed[..., :256].view(3, 1, 2, 128), "k": mixed[..., 256:512].view(3, 1, 2, 128)}
    views |= {"v": mixed[..., 512:].view(3, 1, 4, 128), "a": gates[..., :4], "b": gates[..., 4:]}
    state = states(3, device=device)
    expected, _ = STEP(**kw, state=state.clone())
    assert torch.equal(STEP(**{**kw, **views}, state=state)[0], expected)


@pytest.mark.parametrize("batch, key_dim, value_dim", [(1, 128, 32), (3, 128, 128), (2, 64, 160), (2, 256, 64)])
def test_k_major(device, batch, key_dim, value_dim):
    kw = projections(batch, 1, 2, 4, key_dim, value_dim, device=device)
    state = states(batch, 4, value_dim, key_dim, device=device)
    output, new = gated_delta_rule_decode_trace.reference(**kw, state=state)
    got, returned = K_MAJOR(**kw, state=state)
    assert returned is state
    close(got, output)
    close(state, new)


def test_k_major_of_a_view(device):
    kw = projections(2, 1, device=device)
    wide = torch.randn(2, 4, 128, 256, device=device)
    state, rest = wide[..., ::2], wide[..., 1::2].clone()
    output, new = gated_delta_rule_decode_trace.reference(**kw, state=state)
    close(K_MAJOR(**kw, state=state)[0], output)
    close(state, new)
    assert torch.equal(wide[..., 1::2], rest)


def test_extreme_gates(device):
    """Decays of 0 and 1, and steps that a softplus without its threshold would turn into infinity."""
    kw = projections(1, 1, 1, 4, device=device)
    kw["a"] = ints([[[-100, 100, 30, 0]]], BF16, device=device)
    kw["A_log"] = torch.tensor([0.0, 5.0, -30.0, 88.0], device=device)
    kw["dt_bias"] = torch.zeros(4, device=device)
    got = check({**kw, "state": states(1, device=device)})
    assert got.isfinite().all()


def test_empty_batch(device):
    output, _ = STEP(**projections(0, 1, device=device), state=states(0, device=device))
    assert output.shape == (0, 1, 4, 128)


REFUSED = {
    "q": ((2, 1, 3, 128), "v.shape[2] must be a multiple of q.shape[2]"),
    "k": ((2, 1, 2, 64), "k must have shape"),
    "v": ((2, 2, 4, 128), "v.shape[1] must be 1"),
    "A_log": ((3,), "A_log.shape[0] must be 4"),
    "a": ((2, 1, 2), "a.shape[2] must be 4"),
    "dt_bias": ((2,), "dt_bias.shape[0] must be 4"),
    "b": ((3, 1, 4), "b.shape[0] must be 2"),
    "state": ((2, 4, 128, 64), "state.shape[3] must be 128"),
    "output": ((2, 1, 4, 64), "output must have shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_shapes(device, name):
    kw = {**projections(2, 1, device=device), "state": states(2, device=device)}
    shape, text = REFUSED[name]
    bad = torch.zeros(shape, device=device, dtype=kw[name].dtype if name in kw else BF16)
    if name == "q":
        kw["k"] = bad
    check_refused(STEP, text, **{**kw, name: bad})


def test_refused_options(device):
    kw = projections(2, 1, device=device)
    pool, slots = states(3, device=device), ints([1, 2], device=device)
    with_pool = {**kw, "state": None, "initial_state": pool, "initial_state_indices": slots}
    check_refused(STEP, "unsupported GDN backend", **with_pool, backend="triton")
    check_refused(STEP, "backend must be", **with_pool, backend="rubin")
    check_refused(STEP, "supported only for T > 1", **with_pool, disable_state_update=True)
    check_refused(STEP, "state must be None with initial_state", **{**with_pool, "state": pool})
    check_refused(STEP, "initial_state_indices must be given", **{**with_pool, "initial_state_indices": None})
    check_refused(STEP, "state must be a tensor", **kw, state=None)
    check_refused(STEP, "initial_state_indices must be int32 or int64",
                  **{**with_pool, "initial_state_indices": slots.float()})  # fmt: skip
    check_refused(STEP, "initial_state must be float32 or bfloat16", **{**with_pool, "initial_state": pool.half()})
    check_refused(STEP, "A_log must be float32", **{**with_pool, "A_log": kw["A_log"].bfloat16()})
    if device == "cpu":
        beyond = ints([1, 3], device=device)
        check_refused(STEP, "initial_state_indices must be below 3", **{**with_pool, "initial_state_indices": beyond})
    with pytest.raises(TypeError, match="gated_delta_rule_decode_pretranspose: k must be Tensor"):
        STEP(**{**with_pool, "k": None})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offsets_beyond_32_bits():
    """The last slot of a pool of more than 2^31 elements, once dense and once through a slot stride."""
    slot = 32 * 128 * 128
    pool = torch.zeros(2**31 // slot + 2, 32, 128, 128, device="cuda", dtype=BF16)
    kw = projections(2, 1, 16, 32, device="cuda")
    last = pool.shape[0] - 1
    pool[last].normal_()
    expected = pool[last : last + 1].clone()
    STEP(**{name: x[:1] if x.ndim > 1 else x for name, x in kw.items()}, state=expected)
    more = {"initial_state": pool, "initial_state_indices": ints([last, -1], device="cuda")}
    STEP(**kw, state=None, **more)
    assert torch.equal(pool[last], expected[0]) and not pool[:last].any()
