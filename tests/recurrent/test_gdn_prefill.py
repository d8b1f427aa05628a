# SPDX-License-Identifier: Apache-2.0
"""``chunk_gated_delta_rule`` on each device against the recurrence in float64, with the tolerances of the contract."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from flashinfer.trace.templates.recurrent_gdn_prefill import exact_gated_delta_rule

from ..bad_arguments import check_refused
from .delta import BF16, F16, F32, ROUNDED_STATES, Case, close

FP8 = torch.float8_e4m3fn


def run(case: Case, **more):
    return chunk_gated_delta_rule(**case.arguments, output_final_state=True, **more)


def test_is_published_at_the_top_level():
    assert flashinfer.chunk_gated_delta_rule is chunk_gated_delta_rule


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("heads", [(1, 1, 2), (4, 2, 2), (2, 2, 2)], ids=["gva", "gqa", "same"])
def test_heads(device, dtype, heads):
    """Value heads share queries and keys, query heads share keys and values; one token, and one more than a chunk."""
    case = Case([130, 1, 65], heads, dtype, device)
    close(case, *run(case))


def test_float32(device):
    """The CPU computes float32, in which models are compared; a GPU says that it does not."""
    case = Case([70, 1], (1, 1, 2), F32, device)
    if device == "cuda":
        check_refused(chunk_gated_delta_rule, "q must be float16 or bfloat16", **case.arguments)
        return
    case.q = 3 * case.q
    out, state = run(case, use_qk_l2norm_in_kernel=True)
    assert out.dtype is F32
    expected = exact_gated_delta_rule(**case.arguments, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(out.double(), expected[0], atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(state.double(), expected[1], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("g", [None, "slow", "tiny", "zero", "gates"])
def test_decays(device, g):
    """Decays of 1, 1e-12, 0 and e^-100 leave finite numbers, within the tolerances of fp16."""
    case = Case([200], (1, 1, 2), F16, device, g=g)
    out, state = run(case)
    assert out.isfinite().all() and state.isfinite().all()
    close(case, out, state)


def test_long_memory(device):
    """Decays of 1: errors pile up in the state over all tokens, within the tolerances of bf16."""
    case = Case([1100], (1, 1, 1), BF16, device, g=None)
    close(case, *run(case))


def test_without_gates_and_state(device):
    case = Case([70], (2, 2, 2), BF16, device, g="uniform", beta=False, initial=False)
    close(case, *run(case))


def test_requests_without_tokens_leave_their_states(device):
    case = Case([0, 64, 0], (1, 1, 1), BF16, device)
    kept = torch.full((3, 1, 128, 128), 7.0, device=device)
    out, state = run(case, output_state=kept)
    assert state is kept
    close(case, out, state)
    assert (kept[0] == 7).all() and (kept[2] == 7).all()
    empty = Case([0], (1, 1, 1), BF16, device)
    assert run(empty, output_state=kept[:1])[0].shape == (0, 1, 128)


@pytest.mark.parametrize("strides", ["padded", "inner"])
def test_pool_is_bitwise_equal(device, strides):
    """States in slots of a pool, with padding between slots or every second number: the same bits as packed states."""
    case = Case([100, 65, 3], (1, 1, 2), BF16, device)
    out, state = run(case)
    slots = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    wide = torch.full((6, 2, 128, 256), 5.0, device=device)
    pool = wide[..., ::2] if strides == "inner" else wide[..., :128]
    pool[slots.long()] = case.initial
    arguments = {**case.arguments, "initial_state": pool, "state_indices": slots}
    pooled, returned = chunk_gated_delta_rule(**arguments, output_final_state=True, output_state=pool)
    assert returned is pool
    assert torch.equal(pooled, out) and torch.equal(pool[slots.long()], state)
    assert (pool[[1, 3, 5]] == 5).all() and (wide[..., 1::2] == 5).all() if strides == "inner" else True


def test_checkpoints_are_states_of_prefixes(device):
    """Each checkpoint has the bits of the state after its prefix alone, wherever requests begin."""
    case = Case([300, 30, 129], (1, 1, 2), BF16, device)
    counts = [n // 128 for n in case.lens]
    starts = torch.tensor([0, *counts], device=device).cumsum(0)
    kept = torch.full((sum(counts), 2, 128, 128), torch.nan, device=device)
    run(case, state_checkpoints=kept, checkpoint_cu_starts=starts, checkpoint_every_n_tokens=128)
    row = 0
    for n, count in enumerate(counts):
        begin = int(case.offsets[n])
        for j in range(count):
            part = slice(begin, begin + 128 * (j + 1))
            tensors = {name: getattr(case, name)[part] for name in ("q", "k", "v", "g", "beta")}
            offsets = torch.tensor([0, 128 * (j + 1)], device=device)
            _, state = chunk_gated_delta_rule(
                **tensors, initial_state=case.initial[n : n + 1], cu_seqlens=offsets, output_final_state=True
            )
            assert torch.equal(kept[row], state[0])
            row += 1


def test_parts_side_by_side(device):
    """The split form: within the tolerances, the same in each call, and checkpoints have the bits of prefixes."""
    case = Case([300, 0, 128, 70], (1, 1, 2), BF16, device)
    split = {"use_cp": True, "_cp_chunk_len": 128}
    counts = [n // 128 for n in case.lens]
    starts = torch.tensor([0, *counts], device=device).cumsum(0)
    kept = torch.full((sum(counts), 2, 128, 128), torch.nan, device=device)
    places = {"state_checkpoints": kept, "checkpoint_cu_starts": starts, "checkpoint_every_n_tokens": 128}
    out, state = run(case, **split, **places)
    close(case, out, state)
    again, same = run(case, **split)
    assert torch.equal(out, again) and torch.equal(state[[0, 2, 3]], same[[0, 2, 3]])
    tensors = {name: getattr(case, name)[:256] for name in ("q", "k", "v", "g", "beta")}
    offsets = torch.tensor([0, 256], device=device)
    _, prefix = chunk_gated_delta_rule(
        **tensors, initial_state=case.initial[:1], cu_seqlens=offsets, output_final_state=True, **split
    )
    assert torch.equal(kept[1], prefix[0])


def test_a_prompt_in_two_parts(device):
    """The second part of a prompt goes on from the state of the first."""
    case = Case([192], (1, 1, 2), BF16, device)
    parts, middle = [], case.initial
    for part in (slice(0, 100), slice(100, 192)):
        tensors = {name: getattr(case, name)[part] for name in ("q", "k", "v", "g", "beta")}
        offsets = torch.tensor([0, part.stop - part.start], dtype=torch.int32, device=device)
        piece, middle = chunk_gated_delta_rule(
            **tensors, initial_state=middle, cu_seqlens=offsets, output_final_state=True
        )
        parts.append(piece)
    close(case, torch.cat(parts), middle)


@pytest.mark.parametrize("dtype", [BF16, F16, FP8, torch.float8_e5m2])
def test_states_of_other_types(device, dtype):
    case = Case([66], (1, 1, 1), BF16, device)
    case.initial = case.initial.to(dtype)
    kept = torch.empty(1, 1, 128, 128, dtype=dtype, device=device)
    final = torch.empty_like(kept)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    out, state = run(
        case, output_state=final, state_checkpoints=kept, checkpoint_cu_starts=starts, checkpoint_every_n_tokens=64
    )
    close(case, out, state.float(), (ROUNDED_STATES, ROUNDED_STATES))
    assert kept.float().isfinite().all()


def test_l2norm(device):
    """Normalised inside is the same as normalised and rounded before."""
    case = Case([80], (1, 1, 2), BF16, device)
    case.q, case.k = ((3 * x).to(BF16) for x in (case.q, case.k))
    out, state = run(case, use_qk_l2norm_in_kernel=True)
    expected = exact_gated_delta_rule(**case.arguments, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(out.double(), expected[0], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(state.double(), expected[1], atol=5e-3, rtol=1e-3)


def test_output_scale_and_repetition(device):
    """A given output is written and returned; a scale of 0 means none; results repeat bit by bit."""
    case = Case([90], (1, 1, 1), BF16, device)
    buffer = torch.empty(90, 1, 128, dtype=BF16, device=device)
    out, state = run(case, output=buffer, scale=0.0)
    assert out is buffer
    again, state_again = run(case, max_seqlen=90, use_cp=False)
    assert torch.equal(out, again) and torch.equal(state, state_again)
    doubled, _ = run(case, scale=2 * 128**-0.5)
    torch.testing.assert_close(doubled.float(), 2 * out.float(), atol=1e-2, rtol=1e-2)


def test_neighbours_with_nan_do_not_matter(device):
    """A request of NaN beside another one: only its own results are NaN, also where a chunk's end reaches into it."""
    case = Case([70, 70], (1, 1, 1), BF16, device)
    expected, state = run(case)
    for x in (case.q, case.k, case.v):
        x[70:] = torch.nan
    out, final = run(case)
    assert torch.equal(out[:70], expected[:70]) and torch.equal(final[0], state[0])


def test_many_requests(device):
    """More requests than lanes of a warp, with lengths around the size of a chunk."""
    lens = [0, 1, 63, 64, 65, 2, 0] * 6
    case = Case(lens, (1, 1, 1), BF16, device)
    close(case, *run(case))


def test_compiled(device):
    case = Case([70], (1, 1, 1), BF16, device)

    @torch.compile(fullgraph=True, backend="eager")
    def layer(**arguments):
        return chunk_gated_delta_rule(**arguments, output_final_state=True)[0] + 1

    assert torch.equal(layer(**case.arguments), run(case)[0] + 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph():
    """A captured call follows new inputs in the same memory."""
    case = Case([300, 20], (2, 2, 4), BF16, "cuda")
    run(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, state = run(case)
    other = Case([300, 20], (2, 2, 4), BF16, "cuda", seed=1)
    for name in ("q", "k", "v", "g", "beta", "initial"):
        getattr(case, name).copy_(getattr(other, name))
    graph.replay()
    close(other, out, state)
