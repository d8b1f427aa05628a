# SPDX-License-Identifier: Apache-2.0
"""Long sequences of Kimi delta attention, chunk by chunk on Hopper, against the recurrence in float64."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import ArgumentError
from flashinfer.recurrent import recurrent_kda
from flashinfer.trace.templates import recurrent as templates

from ..bad_arguments import pattern
from .delta import TOLERANCES
from .gdn_inputs import BF16, FP32, ints, states
from .kda_inputs import GATES, inputs


def near(got: torch.Tensor, expected: torch.Tensor, kind: int) -> None:
    """Outputs (0) or states (1) within the tolerances of bf16 prefill; states in bf16 are rounded besides."""
    atol, rtol = TOLERANCES[BF16][0 if got.dtype is BF16 else kind]
    torch.testing.assert_close(got.double(), expected.double(), atol=atol, rtol=rtol)


def check(kw: dict, pool: torch.Tensor, **more) -> torch.Tensor:
    output, new = templates.recurrent_kda_trace.reference(**kw, initial_state=pool, **more)
    got, _ = recurrent_kda(**kw, initial_state=pool, **more)
    near(got, output, 0)
    near(pool, new, 1)
    return got


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("heads, value_heads", [(2, 2), (1, 2)])
def test_gates(device, gate, heads, value_heads):
    check(inputs(2, 100, heads, value_heads, device=device), states(2, value_heads, device=device) * 0.1, **GATES[gate])


def test_packed_sequences(device):
    """Lengths around that of a chunk, a sequence without tokens, padding whose output is 0, a pool in bf16."""
    kw = inputs(1, 300, 1, 1, device=device)
    offsets = ints([0, 130, 130, 131, 194, 230, 300], device=device)
    pool = (states(8, 1, dtype=FP32, device=device, pad=64) * 0.1).to(BF16)
    slots = ints([4, 1, 0, 2, -1, 5], torch.int64, device=device)
    got = check(kw, pool, cu_seqlens=offsets, ssm_state_indices=slots, **GATES["bounded"])
    assert not got[:, 194:230].any()


@pytest.mark.parametrize("least", [0.0, -5.0, -100.0])
def test_decays(device, least):
    """No decay (with keys that are bf16), e^-5 for each token, and channels that e^-100 empties at once."""
    kw = inputs(1, 150 if least else 600, 1, 1, device=device)
    kw["g"] = torch.where(kw["g"] < -1, least, 0.0).to(BF16) if least < -5 else torch.full_like(kw["g"], least)
    if least == 0:
        kw |= {name: torch.nn.functional.normalize(kw[name].float(), dim=-1).to(BF16) for name in ("q", "k")}
    check(kw, states(1, 1, device=device) * 0.1, use_qk_l2norm_in_kernel=least != 0)


def test_other_strides(device):
    """q, k and v as parts of one tensor, beta in float32, an output in float32."""
    kw = inputs(1, 70, 1, 1, device=device)
    packed = torch.cat([kw["q"], kw["k"], kw["v"]], dim=2)
    kw |= {name: packed[:, :, i : i + 1] for i, name in enumerate("qkv")} | {"beta": kw["beta"].float()}
    state, out = states(1, 1, device=device) * 0.1, torch.empty(1, 70, 1, 128, device=device)
    expected, new = templates.recurrent_kda_trace.reference(**kw, initial_state=state)
    assert recurrent_kda(**kw, initial_state=state, output=out)[0] is out
    near(out.to(BF16), expected, 0)
    near(state, new, 1)


def test_parts_and_repetition(device):
    """The second part of a prompt goes on from the state of the first; results repeat bit by bit."""
    kw, start = inputs(1, 192, 1, 1, device=device), states(1, 1, device=device) * 0.1
    whole, again = start.clone(), start.clone()
    got = check(kw, whole)
    assert torch.equal(recurrent_kda(**kw, initial_state=again)[0], got) and torch.equal(whole, again)
    parts, state = [], start.clone()
    for part in (slice(0, 64), slice(64, 192)):
        piece = {name: x[:, part] if x.ndim > 2 else x for name, x in kw.items()}
        parts.append(recurrent_kda(**piece, initial_state=state)[0])
    near(torch.cat(parts, 1), got, 0)
    near(state, whole, 1)


def test_checkpoints(device):
    """States before tokens 0, 64, 128; in rows of a pool those after 64, 128."""
    kw, start = inputs(1, 230, 1, 1, device=device), states(2, 1, device=device) * 0.1
    more = {"cu_seqlens": ints([0, 150, 230], device=device), "checkpoint_every_n_tokens": 64}
    kept, pool = torch.zeros(5, 1, 128, 128, device=device), torch.zeros(5, 1, 128, 128, device=device)
    begins = ints([0, 3], device=device)
    recurrent_kda(**kw, initial_state=start.clone(), **more, state_checkpoints=kept, checkpoint_cu_starts=begins)
    rows = {"checkpoint_cu_starts": ints([0, 2], device=device)}
    rows["checkpoint_state_indices"] = ints([4, 1, 0], device=device)
    recurrent_kda(**kw, initial_state=start.clone(), **more, state_checkpoints=pool, **rows)
    assert torch.equal(kept[0], start[0]) and torch.equal(kept[3], start[1])
    assert torch.equal(pool[[4, 1, 0]], kept[[1, 2, 4]]) and not pool[[2, 3]].any()
    prefix = {name: x[:, :128] if x.ndim > 2 else x for name, x in kw.items()}
    _, expected = templates.recurrent_kda_trace.reference(**prefix, initial_state=start[:1])
    near(kept[2:3], expected, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph():
    """A captured call follows new inputs in the same memory."""
    kw, state = inputs(1, 150, 2, 2, device="cuda"), states(1, 2, device="cuda") * 0.1
    start = state.clone()
    recurrent_kda(**kw, initial_state=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = recurrent_kda(**kw, initial_state=state)
    other = inputs(1, 150, 2, 2, device="cuda")
    for name, x in kw.items():
        x.copy_(other[name])
    state.copy_(start)
    graph.replay()
    expected, new = templates.recurrent_kda_trace.reference(**kw, initial_state=start)
    near(out, expected, 0)
    near(state, new, 1)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_wrapper(device, index):
    """Offsets are planned once and used by every layer; a new plan replaces them, and theirs may change meanwhile."""
    wrapper = flashinfer.RecurrentKDAPrefillWrapper(device)
    for lens in ([40, 0, 30], [5, 9]):
        offsets = torch.tensor([0, *lens], dtype=index).cumsum(0).to(index)
        planned = offsets.clone()
        wrapper.plan(planned, non_blocking=False)
        planned.fill_(-1)
        for _ in range(2):
            kw, state = inputs(1, sum(lens), device=device), states(len(lens), 2, device=device)
            own = state.clone()
            expected = recurrent_kda(**kw, initial_state=state, cu_seqlens=offsets.to(device), **GATES["softplus"])
            got = wrapper.run(**kw, initial_state=own, **GATES["softplus"])
            assert torch.equal(got[0], expected[0]) and torch.equal(own, state)


def test_wrapper_refuses():
    wrapper = flashinfer.RecurrentKDAPrefillWrapper("cpu")
    kw = inputs(1, 3, device="cpu")

    def refused(text, function, *args, **kwargs):
        with pytest.raises(ArgumentError, match=pattern(text)):
            function(*args, **kwargs)

    refused("Wrapper.run: plan must be called before run", wrapper.run, **kw)
    refused("Wrapper.plan: cu_seqlens must be a tensor of int32 or int64, got list", wrapper.plan, [0, 3])
    refused("cu_seqlens must have shape (N + 1,)", wrapper.plan, torch.tensor([0]))
    for wrong in ([1, 3], [0, 2, 1]):
        refused("cu_seqlens must begin with 0 and not fall", wrapper.plan, torch.tensor(wrong))
    wrapper.plan(torch.tensor([0, 4]))
    refused("q must have the 4 planned tokens, got 3", wrapper.run, **kw)
    refused("cu_seqlens must be given to plan", wrapper.run, **kw, cu_seqlens=torch.tensor([0, 3]))
