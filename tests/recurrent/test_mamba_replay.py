# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 by replay: outputs, states and rings against the recurrence in float64; forms, rounding, tuning, errors."""

from __future__ import annotations

import importlib

import pytest
import torch

import flashinfer.mamba
from flashinfer.autotuner import AutoTuner, autotune
from flashinfer.mamba import allocate_checkpointing_ssu_scratch, checkpointing_ssu, replayssm_materialize
from flashinfer.mamba.checkpointing_ssu import CheckpointingSSURunner
from flashinfer.trace.templates.recurrent_mamba_replay import checkpointing_ssu_trace

from ..graphs import capture
from .mamba_inputs import doubled, pool, slots, tokens, weights

BF16, F16, F32, I8, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn
HEADS, DIM, GROUPS, DSTATE, SLOTS = 4, 64, 2, 128, 6


def arguments(
    device, batch=4, steps=3, window=8, state_dtype=BF16, dim=DIM, dstate=DSTATE, is_packed=False, dtype=BF16
):
    """Return a call on slots 5, 0, 3, 1: with a window of 8 and 3 tokens, 5 live rows stay and 6 are written."""
    length = window + steps
    state = pool(SLOTS, HEADS, dim, dstate, BF16, device).float()
    scaled = {}
    if state_dtype in (I8, E4M3):
        limit = 127 if state_dtype == I8 else 448
        scaled["state_scale"] = state.abs().amax(-1) / limit
        codes = state / scaled["state_scale"].unsqueeze(-1)
        state = (codes.round() if state_dtype == I8 else codes).to(state_dtype)
    made = {"state": state.to(state_dtype), **scaled}
    made["x_cache"] = torch.randn(SLOTS, HEADS, length, dim, device=device).to(dtype)
    made["B_cache"] = torch.randn(SLOTS, GROUPS, length, dstate, device=device).to(dtype)
    made["dt_cache"] = torch.rand(SLOTS, HEADS, length, device=device)
    made["ring_start"] = slots(0, 7, 3, 10, 2, 5, device=device) % length
    made["prev_num_accepted_tokens"] = slots(5, 6, 0, 2, 8, 8, device=device).clamp(max=window)
    lead = (1, 8) if is_packed else (batch, steps)
    made |= tokens(lead, HEADS, dim, GROUPS, dstate, device, dtype=dtype)
    made |= weights(HEADS, dim, dstate, device) | {"dt_softplus": True}
    made["out"] = torch.full_like(made["x"], 7.0)
    if is_packed:
        made |= {"cu_seqlens": slots(0, 3, 3, 5, 8, device=device), "max_seqlen": steps}
    made["state_batch_indices"] = slots(5, 0, 3, 1, device=device)[:batch]
    return made


def copied(given):
    return {
        name: x.clone()
        if isinstance(x, torch.Tensor) and x.numel() == x.untyped_storage().nbytes() // x.element_size()
        else x
        for name, x in given.items()
    }


def expected_of(given):
    wide = doubled({name: x for name, x in given.items() if name != "out"})
    for name in ("state", "state_scale"):
        if name in wide and given["state"].dtype in (I8, E4M3):
            wide[name] = given[name].clone()
    return (*checkpointing_ssu_trace.reference(**wide), wide.get("state_scale"))


def check(given, **options):
    before = {name: given[name].clone() for name in ("state", "x_cache", "B_cache", "dt_cache", "ring_start")}
    out, state, x_cache, b_cache, dt_cache, scale = expected_of(given)
    assert checkpointing_ssu(**given, **options) is given["out"]
    skipped = given["out"] == 7.0  # rows of padding
    wanted = torch.where(skipped, 7.0, out)
    torch.testing.assert_close(given["out"].double(), wanted, rtol=2e-2, atol=5e-2)
    assert torch.equal(given["x_cache"].double(), x_cache) and torch.equal(given["B_cache"].double(), b_cache)
    torch.testing.assert_close(given["dt_cache"].double(), dt_cache, rtol=1e-4, atol=1e-5)
    kept = (state == before["state"].to(state.dtype)).flatten(1).all(1) if state.dtype.itemsize > 1 else None
    if given["state"].dtype in (I8, E4M3):
        torch.testing.assert_close(given["state_scale"], scale, rtol=1e-3, atol=0)
        cell = given["state_scale"].unsqueeze(-1) * (1 if state.dtype == I8 else 32)
        real, wanted = (t.float() * given["state_scale"].unsqueeze(-1) for t in (given["state"], state))
        assert ((real - wanted).abs() <= cell * 1.001).all()
    else:
        assert torch.equal(given["state"][kept], before["state"][kept]), "states that are not written keep their bits"
        assert not kept.all(), "one of the sequences fills its ring"
        torch.testing.assert_close(given["state"].double(), state, rtol=2**-7, atol=2e-3)
    assert torch.equal(given["ring_start"], before["ring_start"])


@pytest.mark.parametrize("state_dtype", [BF16, F16, F32, I8, E4M3], ids=str)
def test_replay(device, state_dtype):
    check(arguments(device, state_dtype=state_dtype))


@pytest.mark.parametrize("steps, window", [(1, 16), (16, 16), (4, 4), (1, 1)])
def test_windows(device, steps, window):
    given = arguments(device, steps=steps, window=window)
    given["prev_num_accepted_tokens"][0] = window
    check(given)


@pytest.mark.parametrize("dim, dstate", [(40, 96), (128, 64), (64, 256)])
def test_shapes(device, dim, dstate):
    check(arguments(device, dim=dim, dstate=dstate), z=None)


def test_float16_tokens_and_gate(device):
    given = arguments(device, dtype=F16, state_dtype=F32)
    given["z"] = torch.randn_like(given["x"])
    check(given)


def test_packed_batch(device):
    """Check sequences of 3, 0, 2 and 3 tokens; the second one leaves its slot alone."""
    check(arguments(device, is_packed=True))


@pytest.mark.parametrize("pad", [0, -1])
def test_padding_and_garbage(device, pad):
    """Check that padded sequences are skipped and that rows which are not live may hold anything."""
    given = arguments(device)
    given["state_batch_indices"] = slots(5, pad, 3, pad, device=device)
    given["pad_slot_id"] = pad
    clean = copied(given)
    length = given["x_cache"].shape[2]
    for slot in range(SLOTS):
        live, start = int(given["prev_num_accepted_tokens"][slot]), int(given["ring_start"][slot])
        for i in range(live, length):
            row = (start + i) % length
            given["x_cache"][slot, :, row], given["B_cache"][slot, :, row] = torch.nan, torch.inf
            given["dt_cache"][slot, :, row] = 1e30
    checkpointing_ssu(**given), checkpointing_ssu(**clean)
    assert (given["out"][[1, 3]] == 7).all() and torch.equal(given["out"], clean["out"])
    assert torch.equal(given["state"], clean["state"])


def test_strided_views_of_a_page(device):
    """Check state and rings that are views of one page of memory for each slot, as vLLM has them."""
    given = arguments(device)
    names = ("state", "x_cache", "B_cache")
    sizes = [given[name][0].numel() for name in names]
    page = torch.zeros(SLOTS, sum(sizes) + 64, dtype=BF16, device=device)
    views, at = copied(given), 0
    for name, size in zip(names, sizes, strict=True):
        views[name] = page[:, at : at + size].view(given[name].shape).copy_(given[name])
        at += size
    checkpointing_ssu(**given), checkpointing_ssu(**views)
    for name in (*names, "out", "dt_cache"):
        assert torch.equal(given[name], views[name]), name


@pytest.mark.parametrize("is_packed", [False, True])
def test_forms_agree(device, is_packed):
    given = arguments(device, is_packed=is_packed)
    scratch = allocate_checkpointing_ssu_scratch(7, HEADS, 3, 8, BF16, torch.device(device))
    names = dict(zip(("cb_scaled", "cumAdt_vec", "cb_old"), scratch, strict=True))
    for options in (
        {"algorithm": "two-kernel"},
        {"algorithm": "two-kernel", "precompute_heads_per_cta": 1},
        {"d_split": 2},
    ):
        one, two = copied(given), copied(given)
        checkpointing_ssu(**one, algorithm="monolith", enable_pdl=True)
        checkpointing_ssu(**two, **names, **options)
        torch.testing.assert_close(two["out"], one["out"], rtol=2e-2, atol=5e-2)
        for name in ("state", "x_cache", "B_cache", "dt_cache"):
            assert torch.equal(one[name], two[name]), name


def test_scratch():
    shapes = [t.shape for t in allocate_checkpointing_ssu_scratch(3, 8, 4, 13, BF16, torch.device("cpu"))]
    assert shapes == [(3, 8, 32, 8), (3, 8, 16), (3, 8, 32, 8)]
    for change, text in [({"batch_size": 0}, "must be positive"), ({"num_predicted_tokens": 17}, "in [1, 16]")]:
        sizes = {"batch_size": 1, "num_heads": 1, "num_predicted_tokens": 1, "max_window": 1} | change
        with pytest.raises(ValueError) as caught:
            allocate_checkpointing_ssu_scratch(**sizes, dtype=BF16, device="cpu")
        assert text in str(caught.value)


@pytest.mark.parametrize("state_dtype", [F16, I8, E4M3], ids=str)
def test_random_rounding(device, state_dtype):
    """Check that rounding by random bits stays within a cell of the codes, has no bias, and depends on the seed."""
    given = arguments(device, state_dtype=state_dtype)
    given["prev_num_accepted_tokens"].fill_(6)
    plain, other = copied(given), copied(given)
    seed = torch.tensor([11], device=device)
    checkpointing_ssu(**given, rand_seed=seed)
    checkpointing_ssu(**plain)
    checkpointing_ssu(**other, rand_seed=seed + 1)
    exact = copied(given)
    index = given["state_batch_indices"].long()
    a, b, c = (t["state"][index].float() for t in (given, plain, other))
    assert not torch.equal(a, b) and not torch.equal(a, c)
    if state_dtype == I8:
        assert (a - b).abs().max() <= 1 and abs(float((a - b).mean())) < 0.01
    elif state_dtype == E4M3:
        assert ((a - b).abs() <= 0.126 * torch.maximum(a.abs(), b.abs()) + 2**-9).all()
    else:
        torch.testing.assert_close(a, b, rtol=2**-10, atol=2**-14)
    assert torch.equal(exact["ring_start"], given["ring_start"])


def test_engine_call(device):
    """Check the call of vLLM: positional up to out, int32 slots, null block 0, scratch for more sequences."""
    given = arguments(device)
    given["state_batch_indices"] = slots(5, 0, 3, 1, device=device)
    expected = copied(given)
    checkpointing_ssu(**expected, pad_slot_id=0)
    names = (
        "state",
        "x_cache",
        "B_cache",
        "dt_cache",
        "ring_start",
        "prev_num_accepted_tokens",
        "x",
        "dt",
        "A",
        "B",
        "C",
        "out",
    )
    trio = allocate_checkpointing_ssu_scratch(
        batch_size=64, num_heads=HEADS, num_predicted_tokens=3, max_window=8, dtype=BF16, device=torch.device(device)
    )
    checkpointing_ssu(
        *(given[name] for name in names),
        D=given["D"],
        dt_bias=given["dt_bias"],
        dt_softplus=True,
        state_batch_indices=given["state_batch_indices"],
        pad_slot_id=0,
        rand_seed=None,
        philox_rounds=10,
        cu_seqlens=None,
        max_seqlen=None,
        enable_pdl=False,
        cb_scaled=trio[0],
        cumAdt_vec=trio[1],
        cb_old=trio[2],
    )
    torch.testing.assert_close(given["out"], expected["out"], rtol=2e-2, atol=5e-2)
    assert torch.equal(given["state"], expected["state"])


BAD = [
    ({"max_seqlen": 3}, "max_seqlen must be None without cu_seqlens"),
    ({"cu_seqlens": [0, 3]}, "max_seqlen must be given with cu_seqlens"),
    ({"d_split": 3}, "d_split must be None, 1 or 2"),
    ({"algorithm": "three-kernel"}, "algorithm must be one of auto, monolith, two-kernel"),
    ({"algorithm": "two-kernel"}, "together"),
    ({"cb_old": [0]}, "together"),
    ({"state_scale": [0]}, "state_scale must be None"),
    ({"precompute_heads_per_cta": -1}, "precompute_heads_per_cta must not be negative"),
]


@pytest.mark.parametrize("change, text", BAD, ids=[text for _, text in BAD])
@pytest.mark.parametrize("kind", [ValueError, AssertionError])
def test_bad_options(device, change, text, kind):
    change = {
        k: torch.tensor(v, device=device, dtype=torch.int32) if isinstance(v, list) else v for k, v in change.items()
    }
    with pytest.raises(kind) as caught:
        checkpointing_ssu(**(arguments(device) | change))
    assert str(caught.value).startswith("checkpointing_ssu: ") and text in str(caught.value)


def test_bad_windows_and_tensors(device):
    with pytest.raises(AssertionError, match="at most 16 cache tokens"):
        checkpointing_ssu(**arguments(device, steps=2, window=17))
    with pytest.raises(AssertionError, match="npredicted"):
        checkpointing_ssu(**arguments(device, steps=5, window=4))
    with pytest.raises(AssertionError, match="state_scale must be given"):
        checkpointing_ssu(**(arguments(device, state_dtype=I8) | {"state_scale": None}))
    for name, bad, text in [
        ("D", lambda t: t.float(), "dt_bias must be float32"),
        ("ring_start", lambda t: t.long(), "ring_start must be int32"),
        ("dt_cache", lambda t: t.bfloat16(), "dt_cache must be float32"),
        ("x_cache", lambda t: t[:, :2], "x_cache.shape[1] must be 4"),
        ("out", lambda t: t.float(), "out must be bfloat16"),
        ("state_batch_indices", lambda t: t[:2], "state_batch_indices.shape[0] must be 4"),
    ]:
        given = arguments(device)
        with pytest.raises(ValueError) as caught:
            checkpointing_ssu(**(given | {name: bad(given[name])}))
        assert text in str(caught.value)


def test_slots_out_of_range_on_the_cpu():
    with pytest.raises(ValueError, match="must be pad_slot_id or below 6"):
        checkpointing_ssu(**(arguments("cpu") | {"state_batch_indices": slots(1, 2, 9, 0, device="cpu")}))


def test_names_in_either_order():
    """Check that the name of the function and that of the module both work, whichever program asks first."""
    module = importlib.import_module("flashinfer.mamba.checkpointing_ssu")
    assert module.checkpointing_ssu is flashinfer.mamba.checkpointing_ssu is checkpointing_ssu
    assert callable(module._get_module)
    from flashinfer.jit.mamba.checkpointing_ssu import gen_checkpointing_ssu_module

    keys = (BF16, BF16, BF16, BF16, F32, torch.int32, None, 64, 128, 4, 16, 16, 8, 0, False)
    assert gen_checkpointing_ssu_module(*keys).name == "ssu_replay_bfloat16_bfloat16"


def test_runner(device):
    """Check the runner by hand: the default tactic, the tactics, and that equal settings are equal runners."""
    options = {"dt_softplus": True, "pad_slot_id": -1, "requested_algorithm": "auto", "requested_d_split": None}
    options |= {"precompute_heads_per_cta": 0, "heads_per_group": 2, "optional_tensor_presence": (True, False)}
    runner = CheckpointingSSURunner((BF16, BF16, 64), **options)
    assert runner == CheckpointingSSURunner((BF16, BF16, 64), **options) and hash(runner) == hash(runner)
    given = arguments(device)
    expected = copied(given)
    checkpointing_ssu(**expected)
    trio = allocate_checkpointing_ssu_scratch(4, HEADS, 3, 8, BF16, torch.device(device))
    order = ("out", "state", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens", "x", "dt", "A")
    order += ("B", "C", "D", "z", "dt_bias", "state_scale", "state_batch_indices", "cu_seqlens", "rand_seed")
    assert list(runner.get_valid_tactics([], None)) == [0, 1]
    for tactic in (-1, 0, 1):
        call = copied(given)
        runner.forward([*(call.get(name) for name in order), *trio], tactic=tactic)
        torch.testing.assert_close(call["out"], expected["out"], rtol=2e-2, atol=5e-2)
        assert torch.equal(call["state"], expected["state"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="forms differ on CUDA only")
def test_tuning_leaves_states_alone():
    given = arguments("cuda")
    trio = allocate_checkpointing_ssu_scratch(4, HEADS, 3, 8, BF16, torch.device("cuda"))
    given |= dict(zip(("cb_scaled", "cumAdt_vec", "cb_old"), trio, strict=True))
    expected = copied(given)
    checkpointing_ssu(**expected)
    AutoTuner.get().clear_cache()
    with autotune(True):
        checkpointing_ssu(**given)
    assert torch.equal(given["state"], expected["state"]) and torch.equal(given["x_cache"], expected["x_cache"])
    torch.testing.assert_close(given["out"], expected["out"], rtol=2e-2, atol=5e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graph():
    given = arguments("cuda")
    kept = copied(given)
    graph, _ = capture(lambda: checkpointing_ssu(**given))
    for name in ("state", "x_cache", "B_cache", "dt_cache"):
        given[name].copy_(kept[name])
    graph.replay()
    checkpointing_ssu(**kept)
    for name in ("out", "state", "x_cache", "B_cache", "dt_cache"):
        assert torch.equal(given[name], kept[name]), name


@pytest.mark.parametrize("state_dtype", [BF16, F32, I8], ids=str)
def test_materialize(device, state_dtype):
    """Check two layers, requests 2 and 0 of three: prefixes of 4 and of 0 rows, which is an exact copy."""
    layers = [arguments(device, state_dtype=state_dtype) for _ in range(2)]
    names = ("state", "x_cache", "B_cache", "dt_cache", "state_scale")

    def addresses(name):
        return torch.tensor([layer[name].data_ptr() for layer in layers], device=device)

    def strides(name):
        return torch.tensor([layer[name].stride(0) for layer in layers], device=device)

    rates = [layer["A"][:, 0, 0].contiguous() for layer in layers]
    pairs = [t for name in names[:4] for t in (addresses(name), strides(name))]
    scales = (addresses("state_scale"), strides("state_scale")) if state_dtype == I8 else (None, None)
    before = [copied(layer) for layer in layers]
    source = slots(1, 2, 3, 0, 4, 5, device=device).view(2, 3)
    target = slots(0, 4, 2, 1, 2, 3, device=device).view(2, 3)
    start, prefix = slots(9, 0, 6, device=device), slots(4, 3, 0, device=device)
    replayssm_materialize(
        *pairs,
        torch.tensor([rate.data_ptr() for rate in rates], device=device),
        *scales,
        source,
        target,
        start,
        prefix,
        slots(2, 0, -1, 1, device=device),
        state_dtype=state_dtype,
        input_dtype=BF16,
        matrixA_dtype=F32,
        dim=DIM,
        dstate=DSTATE,
        num_heads=HEADS,
        heads_per_group=HEADS // GROUPS,
        max_window=8,
        ring_buffer_len=11,
        dependency_outputs=[layer["state"] for layer in layers],
    )
    for i, (layer, old) in enumerate(zip(layers, before, strict=True)):
        copy_from, copy_to = int(source[i, 2]), int(target[i, 2])
        assert torch.equal(layer["state"][copy_to], old["state"][copy_from])
        assert torch.equal(layer["state"][int(target[i, 1])], old["state"][int(target[i, 1])]), "after the first -1"
        slot, s = int(source[i, 0]), old["state"][int(source[i, 0])].double()
        if state_dtype == I8:
            s = s * old["state_scale"][slot].double().unsqueeze(-1)
        for j in range(4):
            row = (9 + j) % 11
            dt, x, b = (old[n][slot, :, row].double() for n in ("dt_cache", "x_cache", "B_cache"))
            b = b.repeat_interleave(HEADS // GROUPS, 0)
            s = s * torch.exp(rates[i].double() * dt).view(-1, 1, 1) + (dt.unsqueeze(-1) * x).unsqueeze(
                -1
            ) * b.unsqueeze(1)
        made = layer["state"][int(target[i, 0])].double()
        if state_dtype == I8:
            scale = layer["state_scale"][int(target[i, 0])].double().unsqueeze(-1)
            assert ((made * scale - s).abs() <= scale * 0.51).all()
        else:
            torch.testing.assert_close(made, s, rtol=2**-7, atol=1e-3)
        for name in ("x_cache", "B_cache", "dt_cache"):
            assert torch.equal(layer[name], old[name])


def test_materialize_refuses(device):
    table, numbers = torch.zeros(1, dtype=torch.int64, device=device), slots(0, device=device)
    tensors = [*[table] * 9, None, None, numbers.view(1, 1), numbers.view(1, 1), numbers, numbers, numbers]
    sizes = {"dim": 64, "dstate": 128, "num_heads": 4, "heads_per_group": 2, "max_window": 8, "ring_buffer_len": 9}
    kinds = {"state_dtype": BF16, "input_dtype": BF16, "matrixA_dtype": F32}
    for change, text in [
        ({"input_dtype": F16}, "input_dtype must be torch.bfloat16"),
        ({"max_window": 17}, "max_window must be in [1, 16]"),
        ({"state_dtype": I8}, "state_scale_ptrs must be given"),
        ({"heads_per_group": 3}, "heads_per_group must divide 4"),
    ]:
        with pytest.raises(ValueError) as caught:
            replayssm_materialize(*tensors, **(sizes | kinds | change))
        assert text in str(caught.value)
    with pytest.raises(ValueError, match="state_ptrs must be int64"):
        replayssm_materialize(table.int(), *tensors[1:], **sizes, **kinds)
