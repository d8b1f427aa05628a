# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 over whole sequences (ssd): against the recurrence in float64; packing, checkpoints, chunk sums, errors."""

from __future__ import annotations

import pytest
import torch

from flashinfer.mamba import SSDCombined, selective_state_update, ssd_combined_fwd
from flashinfer.mamba.ssd_combined import _get_seq_chunk_cumsum_module
from flashinfer.trace.templates.recurrent_mamba_chunk import ssd_combined_fwd_trace

from .mamba_inputs import doubled, tied

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HEADS, GROUPS = 4, 2


def arguments(device, tokens, batch=1, dim=64, dstate=128, dtype=BF16, scale=1.0):
    lead = (batch, tokens)
    return {
        "x": torch.randn(*lead, HEADS, dim, device=device).to(dtype),
        "dt": torch.randn(*lead, HEADS, device=device).to(dtype),
        "A": -torch.exp(torch.randn(HEADS, device=device)) * scale,
        "B": torch.randn(*lead, GROUPS, dstate, device=device).to(dtype),
        "C": torch.randn(*lead, GROUPS, dstate, device=device).to(dtype),
        "D": torch.randn(HEADS, device=device).to(dtype),
        "dt_bias": torch.randn(HEADS, device=device).to(dtype),
        "dt_softplus": True,
    }


def packed(lengths, device, dtype=torch.int32):
    ids = [n for n, length in enumerate(lengths) for _ in range(length)]
    return {"seq_idx": torch.tensor([ids], device=device, dtype=dtype)}


def logical_chunks(lengths, chunk, device):
    index, offset, position = [], [], 0
    for length in lengths:
        end = position + length
        while position < end:
            index.append(position // chunk)
            offset.append(position % chunk)
            position = min(end, (position // chunk + 1) * chunk)
    return tuple(torch.tensor(t, device=device, dtype=torch.int32) for t in (index, offset))


def close(actual, expected, digits=8):
    """Compare by the size of the whole result: an output is a sum of hundreds of products of 16-bit numbers."""
    limit = 2.0**-digits
    assert actual.isfinite().all()
    assert float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-9)) < limit
    assert float((actual.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-9)) < 2 * limit


def check(given, **options):
    expected, states = ssd_combined_fwd_trace.reference(**doubled(given | options))
    out, final = ssd_combined_fwd(**given, **options)
    digits = 6 if given["x"].dtype == BF16 else 8
    assert out.shape == given["x"].shape and out.dtype == given["x"].dtype
    close(out, expected, digits)
    close(final, states, digits)
    return out, final


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_lengths(device, tokens):
    check(arguments(device, tokens, batch=2))


@pytest.mark.parametrize("dim, dstate", [(128, 64), (64, 256), (40, 16), (72, 96)])
def test_shapes(device, dim, dstate):
    check(arguments(device, 130, dim=dim, dstate=dstate))


@pytest.mark.parametrize("state_dtype", [F32, BF16, F16], ids=str)
def test_initial_states_gate_and_float16(device, state_dtype):
    given = arguments(device, 100, batch=2, dtype=F16)
    states = torch.randn(2, HEADS, 64, 128, device=device).to(state_dtype)
    _, final = check(given, initial_states=states, z=torch.randn_like(given["x"]))
    assert final.dtype == state_dtype


def test_options(device):
    """Check D by row, float32 dt beside bf16 tokens, limits of dt, no softplus, no bias, no D."""
    given = arguments(device, 70)
    check(given | {"D": torch.randn(HEADS, 64, device=device).to(BF16), "dt": given["dt"].float()}, dt_limit=(0.1, 0.9))
    bare = {name: x for name, x in given.items() if name not in ("D", "dt_bias", "dt_softplus")}
    check(bare | {"dt": bare["dt"].abs()})


LENGTHS = [70, 1, 128, 0, 65]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_packed_sequences(device, index_dtype):
    """Check sequences that begin anywhere, with and without a state; that without tokens keeps its state."""
    given = arguments(device, sum(LENGTHS))
    index = packed(LENGTHS, device, index_dtype)
    states = torch.randn(5, HEADS, 64, 128, device=device)
    _, final = check(given, initial_states=states, **index)
    assert torch.equal(final[3], states[3])
    check(given, num_seqs=5, **index)


def test_packed_sequences_are_those_alone(device):
    """Check bits: a sequence does not depend on what lies beside it, NaN and infinity included."""
    given = arguments(device, sum(LENGTHS))
    alone = {name: t[:, 71:199] if name in ("x", "dt", "B", "C") else t for name, t in given.items()}
    expected, states = ssd_combined_fwd(**alone)
    for name in ("x", "dt", "B", "C"):
        given[name][:, :71] = torch.nan
        given[name][:, 199:] = torch.inf
    out, final = ssd_combined_fwd(**given, num_seqs=5, **packed(LENGTHS, device))
    assert torch.equal(out[:, 71:199], expected) and torch.equal(final[2:3], states)


def test_second_part_of_a_prompt(device):
    given = arguments(device, 150)
    whole, states = ssd_combined_fwd(**given, initial_states=torch.zeros(1, HEADS, 64, 128, device=device))
    parts = []
    last = torch.zeros(1, HEADS, 64, 128, device=device)
    for begin, end in ((0, 77), (77, 150)):
        part = {name: t[:, begin:end] if name in ("x", "dt", "B", "C") else t for name, t in given.items()}
        out, last = ssd_combined_fwd(**part, initial_states=last)
        parts.append(out)
    close(torch.cat(parts, 1), whole.double(), 6)
    close(last, states.double(), 6)


def test_decode_goes_on_from_a_prompt(device):
    """Check that a prompt's state, advanced by one token, is the state of the longer prompt."""
    given = arguments(device, 66)
    prompt = {name: t[:, :65] if name in ("x", "dt", "B", "C") else t for name, t in given.items()}
    zeros = torch.zeros(1, HEADS, 64, 128, device=device)
    _, state = ssd_combined_fwd(**prompt, initial_states=zeros)
    whole, final = ssd_combined_fwd(**given, initial_states=zeros)
    token = {name: given[name][:, 65] for name in ("x", "B", "C")}
    weights = {"A": tied(given["A"], 64, 128), "D": tied(given["D"], 64), "dt_bias": tied(given["dt_bias"], 64)}
    y = selective_state_update(state, **token, dt=tied(given["dt"][:, 65], 64), **weights, dt_softplus=True)
    close(y, whole[:, 65].double(), 5)
    close(state, final.double(), 6)


@pytest.mark.parametrize("scale", [0.0, 1e-12, 300.0])
def test_decays_of_every_size(device, scale):
    """Check that no decay, and decays that overflow when inverted, give what the recurrence gives."""
    check(arguments(device, 130, scale=scale))


def test_results_repeat(device):
    given = arguments(device, 200, batch=2)
    first, last = ssd_combined_fwd(**given), ssd_combined_fwd(**given)
    assert torch.equal(first[0], last[0]) and torch.equal(first[1], last[1])


def test_checkpoints(device):
    """Check states before tokens 33, 71 (the end), 150 and none: also where a chunk has not ended."""
    lengths = [70, 1, 128, 65]
    given = arguments(device, sum(lengths))
    at = {
        "checkpoint_token_indices": torch.tensor([33, 71, 150, 230], device=device, dtype=torch.int32),
        "checkpoint_state_slots": torch.tensor([4, 0, 2, -1], device=device, dtype=torch.int32),
    }
    pool = torch.full((5, HEADS, 64, 128), 7.0, device=device)
    wide = doubled(given | packed(lengths, device))
    expected = pool.double()
    exact, _ = ssd_combined_fwd_trace.reference(**wide, **at, checkpoint_states=expected, num_seqs=4)
    out, final = ssd_combined_fwd(**given, **at, checkpoint_states=pool, num_seqs=4, **packed(lengths, device))
    close(out, exact, 6)
    assert final.dtype == F32
    assert (pool[[1, 3]] == 7).all()
    for slot in (4, 0, 2):
        close(pool[slot], expected[slot], 6)


def test_out_and_strides(device):
    given = arguments(device, 70)
    wide = torch.randn(1, 70, HEADS * 64 + 2 * GROUPS * 128, device=device).to(BF16)
    x, b, c = wide.split([HEADS * 64, GROUPS * 128, GROUPS * 128], dim=2)
    given |= {"x": x.view(1, 70, HEADS, 64), "B": b.view(1, 70, GROUPS, 128), "C": c.view(1, 70, GROUPS, 128)}
    out = torch.empty(1, 70, HEADS, 64, device=device, dtype=BF16)
    result, final = ssd_combined_fwd(**given, out=out, return_final_states=False)
    assert result is out and final is None
    assert torch.equal(
        out, ssd_combined_fwd(**{k: t.contiguous() if isinstance(t, torch.Tensor) else t for k, t in given.items()})[0]
    )


def test_layer(device):
    """Check SSDCombined with results by chunk and by token."""
    given = arguments(device, 256)
    expected, _ = ssd_combined_fwd(**given)
    sizes = {"chunk_size": 128, "nheads": HEADS, "headdim": 64, "dstate": 128, "ngroups": GROUPS}
    out, final = SSDCombined(**sizes, state_dtype=F32).run(**given)
    assert out.shape == (1, HEADS, 64, 2, 128) and final.dtype == F32
    assert torch.equal(out.flatten(3).permute(0, 3, 1, 2), expected)
    assert torch.equal(SSDCombined(**sizes, backend="flashinfer").run(**given)[0], expected)
    layer = SSDCombined(**sizes)
    for change, text in [
        ({"x": given["x"][:, :100]}, "x.shape[1] must be a multiple of 128"),
        ({"D": None}, "D must be given"),
        ({"z": given["x"]}, "z must be None"),
        ({"x": given["x"][..., :32]}, "x and B must end in"),
        ({"x": given["x"].half()}, "x must be torch.bfloat16"),
    ]:
        with pytest.raises(ValueError) as caught:
            layer.run(**(given | change))
        assert text in str(caught.value)
    with pytest.raises(ValueError, match="ngroups must divide 4"):
        SSDCombined(**(sizes | {"ngroups": 3}))


@pytest.mark.parametrize("lengths", [[70, 1, 128, 65], [5], [128, 128], [1] * 40])
def test_chunk_sums(device, lengths):
    index, offset = logical_chunks(lengths, 64, device)
    ids = packed(lengths, device)["seq_idx"]
    counts, position = [], 0
    for length in lengths:
        counts.append(-(-(position + length) // 64) - position // 64)
        position += length
    expected = [sum(counts[:n]) for n in range(len(counts) + 1)]
    assert SSDCombined.compute_seq_chunk_cumsum(ids, index, offset, 64, len(lengths)).tolist() == expected
    output = torch.full((len(lengths) + 1,), -1, dtype=torch.int32, device=device)
    _get_seq_chunk_cumsum_module().seq_chunk_cumsum(ids, index, offset, output, None, 64, len(index), len(lengths))
    assert output.tolist() == expected
    given = arguments(device, sum(lengths))
    options = {"chunk_indices": index, "chunk_offsets": offset, "seq_chunk_cumsum": output.zero_(), "seq_idx": ids}
    index, offset = logical_chunks(lengths, 128, device)
    options |= {"chunk_indices": index, "chunk_offsets": offset}
    ssd_combined_fwd(**given, **options, update_seq_chunk_cumsum=True)
    assert output[-1] == len(index)


BAD = [
    ({"x": lambda t: t.float()}, "x must be bfloat16 or float16"),
    ({"dt": lambda t: t[:, :5]}, "dt.shape[1] must be 70"),
    ({"A": lambda t: t[:2]}, "A.shape[0] must be 4"),
    ({"B": lambda t: t.half()}, "B must be bfloat16"),
    ({"C": lambda t: t[:, :, :1]}, "C must have shape"),
    (
        {"B": lambda t: t[:, :, :1].expand(1, 70, 3, 128), "C": lambda t: t[:, :, :1].expand(1, 70, 3, 128)},
        "B.shape[2] must divide 4",
    ),
    ({"D": lambda t: t[:3]}, "D.shape[0] must be 4"),
    ({"dt_bias": lambda t: t[:3]}, "dt_bias.shape[0] must be 4"),
]


@pytest.mark.parametrize("change, text", BAD, ids=[text for _, text in BAD])
def test_bad_tensors(device, change, text):
    given = arguments(device, 70)
    with pytest.raises(ValueError) as caught:
        ssd_combined_fwd(**(given | {name: bad(given[name]) for name, bad in change.items()}))
    assert str(caught.value).startswith("ssd_combined_fwd: ") and text in str(caught.value)


def test_bad_options(device):
    given = arguments(device, 70)
    ids = packed([70], device)
    for options, text in [
        (ids, "num_seqs must be given"),
        ({"dt_limit": (1.0, 0.5)}, "dt_limit must be"),
        ({"checkpoint_states": torch.zeros(1, HEADS, 64, 128, device=device)}, "must be given together"),
        ({"initial_states": torch.zeros(1, HEADS, 64, 64, device=device)}, "initial_states.shape[3] must be 128"),
        ({"update_seq_chunk_cumsum": True}, "update_seq_chunk_cumsum must come with"),
    ]:
        with pytest.raises(ValueError) as caught:
            ssd_combined_fwd(**given, **options)
        assert text in str(caught.value)
    with pytest.raises(ValueError, match="seq_idx must be at least 0 and below 1"):
        cpu = {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in given.items()}
        ssd_combined_fwd(**cpu, num_seqs=1, seq_idx=torch.ones(1, 70, dtype=torch.int32))
