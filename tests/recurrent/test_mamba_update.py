# SPDX-License-Identifier: Apache-2.0
"""Selective state update (ssu): every mode and index form against the recurrence in float64, and what engines do."""

from __future__ import annotations

import math

import pytest
import torch

from flashinfer._runtime.errors import ArgumentError
from flashinfer.mamba import cake_selective_state_update, selective_state_update
from flashinfer.mamba.selective_state_update import get_selective_state_update_module
from flashinfer.trace.templates.recurrent_mamba import selective_state_update_trace

from ..graphs import capture
from .mamba_inputs import doubled, gap_is_untouched, pool, slots, tied, tokens, weights

BF16, F16, F32, I16 = torch.bfloat16, torch.float16, torch.float32, torch.int16
STORED = {BF16: 2**-8, F16: 2**-11, F32: 1e-5}


def arguments(
    device,
    lead=(3,),
    heads=4,
    dim=64,
    groups=2,
    dstate=128,
    state_dtype=BF16,
    num_slots=6,
    gap=64,
    is_tied=True,
    **dtypes,
):
    made = {"state": pool(num_slots, heads, dim, dstate, state_dtype, device, gap)}
    made |= tokens(lead, heads, dim, groups, dstate, device, is_tied=is_tied, **dtypes)
    made |= weights(heads, dim, dstate, device, is_tied=is_tied) | {"dt_softplus": True}
    if state_dtype == I16:
        made["state_scale"] = torch.rand(num_slots, heads, dim, device=device) * 1e-4
    return made


def check(given, **options):
    """Call with copies, compare outputs and states with float64, and check that other slots keep their bits."""
    state, before = given["state"], given["state"].clone()
    wide = doubled(given | options)
    wide["state"] = state.double() if state.dtype != I16 else state.clone()
    if state.dtype == I16:
        wide |= {name: wide[name].float() for name in ("state_scale",)}
    expected, new = selective_state_update_trace.reference(**wide)
    out = selective_state_update(**given, **options)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=2e-3 if given["x"].dtype == F32 else 2e-2)
    if state.dtype == I16:
        scale, wanted = given["state_scale"], wide["state_scale"]
        torch.testing.assert_close(scale, wanted, rtol=1e-4, atol=0)
        written = (wanted != given["state_scale"]).any() or True
        assert written and (state.int() - new.int()).abs().max() <= 1
    else:
        tolerance = STORED[state.dtype]
        torch.testing.assert_close(state.double(), new, rtol=tolerance * 1.5, atol=1e-5)
        kept = (new == before.double()).flatten(1).all(1)
        assert torch.equal(state[kept], before[kept])
    assert gap_is_untouched(state)
    return out


@pytest.mark.parametrize("state_dtype", [BF16, F16, F32, I16], ids=str)
@pytest.mark.parametrize("dstate, dim, groups", [(128, 64, 2), (64, 128, 1), (256, 64, 4), (96, 40, 1)])
def test_single_token(device, state_dtype, dstate, dim, groups):
    given = arguments(device, dim=dim, groups=groups, dstate=dstate, state_dtype=state_dtype)
    check(given, state_batch_indices=slots(4, 0, 2, device=device))


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_other_dtypes_of_tokens(device, dtype):
    given = arguments(device, dtype=dtype, state_dtype=F32, num_slots=3)
    check(given)


def test_float32_dt_beside_bf16_tokens(device):
    given = arguments(device, dt_dtype=F32)
    given |= {"D": given["D"].float(), "dt_bias": given["dt_bias"].float()}
    check(given, state_batch_indices=slots(1, 2, 3, device=device, dtype=torch.int64))


def test_gate_and_no_bias(device):
    given = arguments(device, lead=(5,), num_slots=5)
    del given["dt_bias"]
    check(given, z=torch.randn_like(given["x"]))


@pytest.mark.parametrize("state_dtype, dstate", [(F32, 16), (BF16, 128)])
def test_untied_weights(device, state_dtype, dstate):
    """Check Mamba-1: A and dt have a number for each row, and A for each column."""
    given = arguments(device, heads=2, groups=1, dim=40, dstate=dstate, state_dtype=state_dtype, is_tied=False)
    check(given, state_batch_indices=slots(5, 1, 0, device=device))


def test_no_heads(device):
    """Check Mamba-1 as it is called: no axis of heads, nor of groups."""
    given = arguments(device, heads=1, groups=1, dim=40, dstate=16, state_dtype=F32, is_tied=False, gap=0, num_slots=3)
    flat = {name: t.squeeze(1) if name in ("state", "x", "dt", "B", "C") else t for name, t in given.items()}
    flat |= {name: flat[name][0] for name in ("A", "D", "dt_bias")}
    flat["state"] = flat["state"].clone()
    out = selective_state_update(**flat)
    assert out.shape == (3, 40)
    expected = selective_state_update(**given)
    assert torch.equal(out, expected.squeeze(1)) and torch.equal(flat["state"], given["state"].squeeze(1))


@pytest.mark.parametrize("pad", [-1, 0])
def test_padding(device, pad):
    """Check that padding reads zeros and writes nothing; engines have -1 or, with a null block, slot 0."""
    given = arguments(device, lead=(4,))
    index = slots(3, pad, 1, pad, device=device)
    before = given["state"].clone()
    out = check(given, state_batch_indices=index, pad_slot_id=pad)
    assert out[1].any() and torch.equal(given["state"][[0, 2, 4, 5]], before[[0, 2, 4, 5]])


def test_other_target(device):
    given = arguments(device)
    index, target = slots(0, 1, 2, device=device), slots(3, -1, 5, device=device)
    before = given["state"].clone()
    check(given, state_batch_indices=index, dst_state_batch_indices=target)
    assert torch.equal(given["state"][:3], before[:3]) and torch.equal(given["state"][4], before[4])


def test_columns_without_accepted_tokens(device):
    given = arguments(device)
    index = slots(0, 9, 1, 9, 2, 9, device=device).view(3, 2)
    check(given, state_batch_indices=index, dst_state_batch_indices=index)


@pytest.mark.parametrize("state_dtype", [BF16, I16], ids=str)
def test_several_tokens(device, state_dtype):
    given = arguments(device, lead=(3, 4), state_dtype=state_dtype)
    check(given, cache_steps=4, state_batch_indices=slots(2, 4, 1, device=device), z=torch.randn_like(given["x"]))


@pytest.mark.parametrize("state_dtype", [BF16, F32, I16], ids=str)
@pytest.mark.parametrize("has_rows", [True, False])
def test_states_after_each_token(device, state_dtype, has_rows):
    """Check SGLang's verification: the state stays, those after each token go to a buffer."""
    given = arguments(device, lead=(3, 4), state_dtype=state_dtype)
    index = slots(2, -1, 1, device=device)
    buffer = torch.zeros(6, 5, *given["state"].shape[1:], device=device).to(state_dtype)
    options = {"cache_steps": 4, "state_batch_indices": index, "disable_state_update": True}
    options |= {"intermediate_state_indices": slots(0, 5, 3, device=device)} if has_rows else {}
    scales = torch.zeros(6, 5, *given["state"].shape[1:3], device=device) if state_dtype == I16 else None
    wide = doubled(given | options)
    wide["state"] = given["state"].clone() if state_dtype == I16 else given["state"].double()
    kept, kept_scales = buffer.clone() if state_dtype == I16 else buffer.double(), None
    if scales is not None:
        wide["state_scale"], kept_scales = wide["state_scale"].float(), scales.clone()
    expected, _ = selective_state_update_trace.reference(
        **wide, intermediate_states_buffer=kept, intermediate_state_scales=kept_scales
    )
    before = given["state"].clone()
    out = selective_state_update(
        **given, **options, intermediate_states_buffer=buffer, intermediate_state_scales=scales
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=2e-2)
    assert torch.equal(given["state"], before)
    if scales is not None:
        torch.testing.assert_close(scales, kept_scales, rtol=1e-4, atol=0)
        assert (buffer.int() - kept.int()).abs().max() <= 1
    else:
        torch.testing.assert_close(buffer.double(), kept, rtol=1.5 * STORED[state_dtype], atol=1e-5)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_packed_batch(device, index_dtype):
    """Check sequences of 3, 0, 1 and 4 tokens."""
    given = arguments(device, lead=(8,))
    bounds = slots(0, 3, 3, 4, 8, device=device, dtype=index_dtype)
    index = slots(5, 1, 0, 2, device=device, dtype=index_dtype)
    before = given["state"].clone()
    check(given, cu_seqlens=bounds, cache_steps=4, state_batch_indices=index)
    assert torch.equal(given["state"][1], before[1])


@pytest.mark.parametrize("pad", [-1, 0])
def test_accepted_tokens(device, pad):
    """Check speculative decoding of vLLM: a slot for each token, the first state from the last accepted one."""
    given = arguments(device, lead=(6,), num_slots=12)
    index = slots(1, 2, 3, 4, 5, 6, pad, pad, pad, device=device).view(3, 3)
    given["x"] = given["x"][:6]
    options = {"cu_seqlens": slots(0, 3, 5, 6, device=device), "cache_steps": 3, "pad_slot_id": pad}
    options |= {"num_accepted_tokens": slots(2, 0, 1, device=device)}
    check(given, state_batch_indices=index, dst_state_batch_indices=index, **options)


def philox(seed, offset, rounds):
    """Return the first word of Philox-4x32, in plain Python."""
    low = 2**32 - 1
    c, k = [offset & low, offset >> 32, 0, 0], [seed & low, seed >> 32]
    for _ in range(rounds):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & low, (a >> 32) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c[0]


@pytest.mark.parametrize("seed, rounds", [(1234, 10), (2**40 + 7, 6)])
def test_random_rounding_is_that_of_philox(device, seed, rounds):
    """Check bits: the state becomes B, so that its rounding is known exactly."""
    given = arguments(device, lead=(2,), heads=2, groups=1, dim=8, state_dtype=F16, dtype=F32, num_slots=4)
    given |= {"dt_softplus": False, "x": torch.ones_like(given["x"]), "dt": torch.ones_like(given["x"])}
    del given["dt_bias"]
    given["state"].zero_()
    rand_seed = torch.tensor([seed], device=device)
    index = slots(3, 1, device=device)
    selective_state_update(**given, state_batch_indices=index, rand_seed=rand_seed, philox_rounds=rounds)
    state, strides = given["state"].cpu(), given["state"].stride()
    for n, slot in enumerate(index.tolist()):
        for head, row, column in [(0, 0, 0), (1, 7, 127), (1, 3, 64), (0, 5, 9)]:
            offset = sum(i * s for i, s in zip((slot, head, row, column), strides, strict=True))
            value = float(given["B"][n, 0, column])
            fraction, exponent = math.frexp(abs(value))
            steps = int(fraction * 2**24) + (philox(seed, offset, rounds) & 0x1FFF)
            wanted = math.copysign((steps >> 13) * 2.0 ** (exponent - 11), value)
            assert float(state[slot, head, row, column]) == wanted


def test_random_rounding(device):
    given = arguments(device, state_dtype=F16)
    seed = torch.tensor([99], device=device)
    options = {"state_batch_indices": slots(4, 0, 2, device=device), "rand_seed": seed}
    wide = {name: t.float() if isinstance(t, torch.Tensor) and name != "state" else t for name, t in given.items()}
    plain = doubled(given | {"state_batch_indices": options["state_batch_indices"]})
    exact = selective_state_update_trace.reference(**plain)[1]
    _, bits = selective_state_update_trace.reference(**wide, **options)
    selective_state_update(**given, **options)
    state = given["state"]
    assert (state != bits).float().mean() < 1e-3  # float32 sums may differ in their last bit
    torch.testing.assert_close(state.double(), exact, rtol=2**-10, atol=2**-14)
    assert not torch.equal(state, exact.half()), "half of the numbers round the other way"
    assert abs(float((state.double() - exact)[[4, 0, 2]].mean())) < 1e-5


def test_results_do_not_depend_on_the_batch(device):
    given = arguments(device, lead=(5,))
    one = {name: t[2:3] if name in ("x", "dt", "B", "C") else t for name, t in given.items()}
    one["state"] = given["state"].clone()
    alone = selective_state_update(**one, state_batch_indices=slots(2, device=device))
    out = selective_state_update(**given, state_batch_indices=slots(0, 1, 2, 3, 4, device=device))
    assert torch.equal(out[2:3], alone) and torch.equal(given["state"][2], one["state"][2])


def test_out_is_returned_and_strided_tokens_are_taken(device):
    given = arguments(device, num_slots=3)
    packed = torch.randn(3, 4 * 64 + 2 * 128 + 2 * 128, device=device).to(BF16)
    x, b, c = packed.split([256, 256, 256], dim=1)
    given |= {"x": x.view(3, 4, 64), "B": b.view(3, 2, 128), "C": c.view(3, 2, 128)}
    out = torch.empty(3, 4, 64, device=device, dtype=BF16)
    again = given | {"state": given["state"].clone()}
    assert selective_state_update(**given, out=out) is out
    assert torch.equal(out, selective_state_update(**again))


@pytest.mark.parametrize("algorithm", ["simple", "vertical", "horizontal"])
def test_algorithms_and_backends_agree(device, algorithm):
    given = arguments(device, num_slots=3)
    copies = [given | {"state": given["state"].clone()} for _ in range(3)]
    out = selective_state_update(**copies[0])
    assert torch.equal(selective_state_update(**copies[1], algorithm=algorithm, backend="flashinfer"), out)
    assert torch.equal(cake_selective_state_update(**copies[2]), out)


def test_large_decay_stays_finite(device):
    """Check dt of 100 and A of -e^5: the state is forgotten, nothing overflows."""
    given = arguments(device, num_slots=3)
    given |= {"dt": torch.full_like(given["dt"], 100.0), "A": given["A"] * 150}
    check(given)


def test_torch_compile(device):
    given = arguments(device, num_slots=3)
    other = given | {"state": given["state"].clone()}
    out = torch.compile(lambda: selective_state_update(**other), backend="aot_eager", fullgraph=True)()
    assert torch.equal(out, selective_state_update(**given)) and torch.equal(other["state"], given["state"])


BAD = [
    ({"rand_seed": 7}, TypeError, "rand_seed must be a tensor"),
    ({"rand_seed": (2, torch.int64)}, ValueError, "rand_seed must have 1 element"),
    ({"rand_seed": (1, torch.int32)}, ValueError, "rand_seed must be int64"),
    ({"rand_seed": (1, torch.int64), "philox_rounds": 0}, ValueError, "philox_rounds must be positive"),
    ({"algorithm": "diagonal"}, ValueError, "algorithm must be one of"),
    ({"backend": "triton"}, ValueError, "backend must be one of"),
    ({"state_scale": (6, torch.float32)}, ValueError, "state_scale must be None"),
    ({"cache_steps": 2}, ValueError, "x must have 4 dimensions"),
    ({"state_batch_indices": (2, torch.int32)}, ValueError, "state_batch_indices.shape[0] must be 3"),
    ({"state_batch_indices": (3, torch.float32)}, ValueError, "state_batch_indices must be int32 or int64"),
    ({"num_accepted_tokens": (3, torch.int32)}, ValueError, "state_batch_indices must be given"),
]


@pytest.mark.parametrize("change, kind, text", BAD, ids=[text for _, _, text in BAD])
def test_bad_options(device, change, kind, text):
    change = {k: torch.ones(v[0], device=device).to(v[1]) if isinstance(v, tuple) else v for k, v in change.items()}
    with pytest.raises(kind) as caught:
        selective_state_update(**arguments(device), **change)
    assert str(caught.value).startswith("selective_state_update: ") and text in str(caught.value)


BAD_TENSORS = [
    ("x", lambda t: t[..., :32], "x.shape[2] must be 64"),
    ("x", lambda t: t.to(torch.float64), "x must be one of"),
    ("dt", lambda t: t[:2], "dt.shape[0] must be 3"),
    ("dt", lambda t: t.int(), "dt must be float32"),
    ("B", lambda t: t.float(), "B must be bfloat16"),
    ("B", lambda t: t[:, :1].repeat(1, 3, 1), "C must have shape"),
    ("A", lambda t: t.bfloat16(), "A must be float32"),
    ("A", lambda t: t[:2], "A.shape[0] must be 4"),
    ("D", lambda t: t[:, :3], "D.shape[1] must be 64"),
    ("state", lambda t: t.transpose(2, 3), "state.stride(-1) must be 1"),
    ("state", lambda t: t[:2], "state.shape[0] must be at least the number of sequences"),
    ("state", lambda t: t.to("meta"), "must be"),
]


@pytest.mark.parametrize("name, change, text", BAD_TENSORS, ids=[text for *_, text in BAD_TENSORS])
def test_bad_tensors(device, name, change, text):
    given = arguments(device)
    with pytest.raises(ValueError) as caught:
        selective_state_update(**(given | {name: change(given[name])}))
    assert str(caught.value).startswith("selective_state_update: ") and text in str(caught.value)


def test_bad_combinations(device):
    given = arguments(device, lead=(3, 2))
    buffer = torch.zeros(3, 2, *given["state"].shape[1:], device=device, dtype=BF16)
    kept = given | {"cache_steps": 2, "intermediate_states_buffer": buffer}
    index = slots(0, 1, 2, device=device)
    with pytest.raises(ValueError, match="dst_state_batch_indices must be None"):
        selective_state_update(**kept, state_batch_indices=index, dst_state_batch_indices=index)
    with pytest.raises(ValueError, match="intermediate_state_indices must be int32"):
        selective_state_update(**kept, state_batch_indices=index, intermediate_state_indices=index.long())
    scaled = arguments(device, lead=(3, 2), state_dtype=I16)
    with pytest.raises(RuntimeError, match="does not support scaled"):
        selective_state_update(**scaled, cache_steps=2, algorithm="vertical")
    seed = torch.tensor([1], device=device)
    with pytest.raises(ValueError, match="rand_seed must be None with state_scale"):
        selective_state_update(**scaled, cache_steps=2, rand_seed=seed)


def test_slots_out_of_range_on_the_cpu():
    given = arguments("cpu")
    for bad in (6, -2):
        with pytest.raises(ValueError, match="must be pad_slot_id or below 6"):
            selective_state_update(**given, state_batch_indices=slots(0, bad, 1, device="cpu"))
    with pytest.raises(ValueError, match="cu_seqlens must not fall"):
        selective_state_update(**given, cu_seqlens=slots(0, 2, 1, device="cpu"), cache_steps=3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graph():
    """Check that a captured update reads slots and tokens that change between replays."""
    given = arguments("cuda")
    index = slots(0, 1, 2, device="cuda")
    first = given["state"].clone()
    graph, out = capture(lambda: selective_state_update(**given, state_batch_indices=index))
    given["state"].copy_(first)
    given["x"].normal_()
    index.copy_(slots(5, 4, 3, device="cuda"))
    graph.replay()
    given["state"].copy_(first), graph.replay()
    wide = doubled(given | {"state": first, "state_batch_indices": index})
    expected, new = selective_state_update_trace.reference(**wide)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(given["state"].double(), new, rtol=2**-7, atol=1e-5)


def test_dt_expanded_from_a_projection(device):
    """Check dt as vLLM cuts it out of a wider projection: stride 0 over rows, a large one between tokens."""
    given = arguments(device, num_slots=3)
    wide = torch.randn(3, 50, device=device).to(BF16)
    given["dt"] = tied(wide[:, 20:24], 64)
    check(given)


def test_module_of_a_kind_of_call(device):
    """Check that the published function loads the module that a call of these dtypes uses."""
    kinds = (device, F32, BF16, F32, F32, torch.int32, 64, 128, 1, None, None)
    given = arguments(device, state_dtype=F32)
    expected = given["state"].clone()
    out, mine = torch.empty_like(given["x"]), given["state"].clone()
    step = get_selective_state_update_module(*kinds).ssu_decode
    names = ("x", "dt", "A", "B", "C", "D")
    step(out, mine, *(given[name] for name in names), given.get("z"), given["dt_bias"], None, None, True, -1)
    wanted = selective_state_update(**{**given, "state": expected})
    assert torch.equal(out, wanted) and torch.equal(mine, expected)
    with pytest.raises(ArgumentError, match=r"matrixA_dtype must be one of float32, got torch.bfloat16"):
        get_selective_state_update_module(*kinds[:4], BF16, *kinds[5:])
