# SPDX-License-Identifier: Apache-2.0
"""The published steps of the split form, one after another, against the recurrence in float64."""

from __future__ import annotations

import functools
import inspect
import itertools

import pytest
import torch

from flashinfer.gdn_kernels.delta_rule_dsl import delta_rule_cp_sm90 as steps
from flashinfer.gdn_kernels.delta_rule_dsl import varlen_helper

from ..bad_arguments import check_refused
from .delta import F16, Case, close


def states_after_chunks(case: Case, chunk: int, **more) -> tuple[torch.Tensor, torch.Tensor]:
    """Return T and the states after each chunk."""
    place = (case.offsets, case.tokens)
    t = steps.cp_delta_rule_t_precompute_dsl_sm90(case.k, case.beta, *place)
    m, n = steps.cp_delta_rule_mn_precompute_dsl_sm90(case.k, case.v, t, case.g, *place, chunk)
    return t, steps.cp_delta_rule_fixup_dsl_sm90(m, n, *place, chunk, case.initial, **more)


@pytest.mark.parametrize("g", ["uniform", "zero"])
def test_steps(device, g):
    """Requests of several chunks, of a part of one, and of none; states in slots of a pool; checkpoints of both."""
    case = Case([300, 0, 128, 70], (1, 1, 2), F16, device, g=g)
    t, fixed = states_after_chunks(case, 128)
    assert t.shape == (steps.chunk_bound(4, 498, 64), 2, 64, 64) and t.dtype is F16
    slots = torch.tensor([3, 1, 0, 5], device=device)
    pool = torch.full((6, 2, 128, 128), 7.0, device=device)
    pool[slots] = case.initial
    for every in (64, 128):
        counts = torch.tensor([0, *(n // every for n in case.lens)], device=device).cumsum(0)
        kept = torch.full((int(counts[-1]), 2, 128, 128), torch.nan, device=device)
        out, final = torch.empty(498, 2, 128, dtype=F16, device=device), pool.clone()
        steps.cp_delta_rule_prefill_dsl_sm90(
            out, final, case.q, case.k, case.v, t, fixed, case.g, None, case.offsets, 498, 128, None, pool, slots, kept,
            counts, every,
        )  # fmt: skip
        close(case, out, final[slots], ((5e-3, 5e-3), (5e-3, 5e-3)))
        assert (final[[2, 4]] == 7).all() and torch.equal(final[1], pool[1])
        torch.testing.assert_close(kept[128 // every - 1], fixed[0], atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(kept[-1 if every == 128 else -2], final[0], atol=5e-3, rtol=5e-3)


def test_inverse(device):
    """T is -(A^-1 diag(beta))^T, zeros after the end of a block."""
    case = Case([70], (1, 1, 1), F16, device)
    t = steps.cp_delta_rule_t_precompute_dsl_sm90(case.k, case.beta, case.offsets, 70).double()
    k, beta = case.k[:64, 0].double(), case.beta[:64, 0].double()
    lower = torch.eye(64, device=device).double() + torch.tril(beta[:, None] * (k @ k.T), -1)
    torch.testing.assert_close(lower @ -t[0, 0].T, torch.diag(beta), atol=5e-3, rtol=0)
    assert not t[1, 0, :, 6:].any() and not t[1, 0, 6:].any()


def test_all_at_once(device):
    case = Case([200, 64], (2, 2, 2), F16, device)
    out, final = torch.empty(264, 2, 128, dtype=F16, device=device), torch.empty_like(case.initial)
    tensors = (out, final, case.q, case.k, case.v, case.g, case.beta, case.offsets, None)
    steps.cp_delta_rule_dsl_sm90(*tensors, initial_state=case.initial, cp_chunk_len=64)
    close(case, out, final)


def test_chunks_of_one_token(device):
    """The chain alone: any matrices, and a chunk for each token."""
    m, n = torch.randn(5, 1, 128, 128, device=device) / 12, torch.randn(5, 1, 128, 128, device=device)
    got = steps.cp_delta_rule_fixup_dsl_sm90(m, n, torch.tensor([0, 2, 3], device=device), 3, 1, _kernel_kind="hmma")
    assert varlen_helper.workspace_num_chunks_host(torch.tensor([0, 2, 3]), 1, 3) == 3
    torch.testing.assert_close(got[1], n[0] @ m[1] + n[1], atol=2e-3, rtol=2e-3)
    assert torch.equal(got[0], n[0]) and torch.equal(got[2], n[2])


def test_refused(device):
    m = torch.zeros(1, 1, 128, 128, device=device)
    place = (torch.tensor([0, 1], device=device), 1)
    check_refused(steps.cp_delta_rule_fixup_dsl_sm90, "cp_chunk_len must be", m, m, *place, 0)
    check_refused(steps.cp_delta_rule_fixup_dsl_sm90, "_kernel_kind must be", m, m, *place, _kernel_kind="row")
    assert varlen_helper.is_integer_dtype(torch.int32) and not varlen_helper.is_integer_dtype(torch.float32)
    granularity = {"cp_chunk_len_granularity": 100}
    check_refused(steps.cp_delta_rule_dsl_sm90, "cp_chunk_len must be", *(None,) * 9, **granularity)
    check_refused(steps.cp_delta_rule_fixup_dsl_sm90, "_device must be", m, m, *place, _device="meta")


def test_where_a_step_runs(device):
    """The published keywords: the device of the tensors, and a stream of it, also as its address."""
    case = Case([70], (1, 1, 1), F16, device)
    call = functools.partial(steps.cp_delta_rule_t_precompute_dsl_sm90, case.k, case.beta, case.offsets, 70)
    expected = call()
    assert torch.equal(call(_skip_check=True, _device=case.k.device), expected)
    if device == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for given in (stream, stream.cuda_stream):
            got = call(_stream=given)
            torch.cuda.current_stream().wait_stream(stream)
            assert torch.equal(got, expected)
    names = inspect.signature(steps.cp_delta_rule_fixup_dsl_sm90).parameters
    assert list(names)[:2] == ["local_transfer", "local_state"] and list(names)[-2:] == ["_device", "_stream"]


@pytest.mark.parametrize("lens", [[1], [64, 65], [0, 200, 0, 63], [1] * 5])
@pytest.mark.parametrize("chunk", [1, 64, 128])
def test_slots_of_chunks(lens, chunk):
    """Slots of a sequence's chunks follow each other and are nobody else's, and the workspace has room for all."""
    starts = [0, *itertools.accumulate(lens)]
    total = starts[-1]
    used = []
    for i, length in enumerate(lens):
        first = varlen_helper.chunk_bound_host(i, starts[i], chunk)
        used += range(first, first + -(-length // chunk))
    assert len(set(used)) == len(used)
    rows = varlen_helper.workspace_num_chunks_host(torch.tensor(starts), chunk, total)
    assert max(used, default=-1) < rows == varlen_helper.chunk_bound_host(len(lens), total, chunk)
    assert steps.chunk_bound is varlen_helper.chunk_bound_host


@pytest.mark.parametrize(
    "num_seqs, total, heads, sms, splits, chunk",
    [
        (1, 8192, 8, 132, True, 1024),  # sixteen chains: eight parts of each fill the card
        (1, 8192, 32, 132, False, 4096),  # more than a quarter of the card is busy without parts
        (1, 2047, 4, 132, False, 512),  # too short to pay
        (4, 32768, 4, 132, True, 2048),
        (1, 100_000, 2, 132, True, 3072),
        (0, 0, 2, 132, False, 512),
        (1, 8192, 8, 0, False, 4096),  # no such kernel on this device
    ],
)
def test_what_is_split(num_seqs, total, heads, sms, splits, chunk):
    assert varlen_helper.should_use_cp_host(num_seqs, total, heads, sms) is splits
    assert varlen_helper.choose_cp_chunk_len_host(num_seqs, total, heads, sms, 512) == chunk
    exact = varlen_helper.choose_cp_chunk_len_host(num_seqs, total, heads, sms)
    assert exact % steps.BLK == 0 and chunk - 512 < exact <= chunk


def test_pool_of_the_steps_is_bitwise_equal(device):
    """States in slots of a pool with other strides, and packed ones: the same bits of outputs, states, checkpoints."""
    case = Case([130, 64], (1, 1, 2), F16, device)
    slots = torch.tensor([3, 0], dtype=torch.int32, device=device)
    wide = torch.full((5, 2, 128, 200), 7.0, device=device)
    pool = wide[..., :128]
    pool[slots.long()] = case.initial
    starts = torch.tensor([0, 2, 3], device=device)
    results = []
    for initial, final, indices in ((case.initial, torch.empty_like(case.initial), None), (pool, pool, slots)):
        out = torch.empty(194, 2, 128, dtype=F16, device=device)
        kept = torch.full((3, 2, 128, 128), torch.nan, device=device)
        steps.cp_delta_rule_dsl_sm90(
            out, final, case.q, case.k, case.v, case.g, case.beta, case.offsets, None, initial_state=initial,
            state_indices=indices, state_checkpoints=kept, checkpoint_cu_starts=starts, checkpoint_every_n_tokens=64,
        )  # fmt: skip
        results.append((out, final if indices is None else final[indices.long()], kept))
    for packed, pooled in zip(*results, strict=True):
        assert torch.equal(packed, pooled)
    assert (pool[[1, 2, 4]] == 7).all() and (wide[..., 128:] == 7).all()
