# SPDX-License-Identifier: Apache-2.0
"""The fused all-reduce: ranks as processes over shared memory, and as threads or streams of one process."""

from __future__ import annotations

import os
import random
import time
import warnings

import pytest
import torch

from flashinfer.comm import AllReduceFusionPattern as P
from flashinfer.comm import CommTimeoutError, allreduce_fusion
from flashinfer.comm.local_ranks import call_on_ranks

from .calls import (
    DYNAMIC,
    FP8,
    call,
    check,
    digest,
    expected,
    inputs,
    make_workspace,
)
from .foreign import EngineBackend
from .patterns import more_patterns
from .ranks import Ranks, time_limit

PATTERNS = (0, 1, 2, 4, 10, 11)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def run_cases(comm, dtype, device, cases):
    """Run cases on one workspace and compare each with the reference; return digests, equal on all ranks."""
    rank, world = comm.Get_rank(), comm.Get_size()
    workspace = make_workspace(EngineBackend(comm), 64, 2880, dtype, device)
    digests = []
    try:
        for seed, (pattern, tokens, hidden) in enumerate(cases):
            options = {"weight_bias": float(seed % 2), "rms_eps": 1e-5}
            if pattern in FP8:
                options["scale_factor"] = 0.25 if seed % 2 else torch.tensor([0.25], device=device)
            found = call(workspace, pattern, inputs(rank, tokens, hidden, dtype, device, seed), **options)
            options = {name: 0.25 if name == "scale_factor" else value for name, value in options.items()}
            check(found, expected(world, pattern, (tokens, hidden), dtype, seed, **options), dtype)
            digests.append(digest(found))
    finally:
        workspace.destroy()
    return digests


#: Sizes go up and down; rows of one vector, of 2880 (no power of two), more rows than some calls before.
CASES = [(p, tokens, hidden) for p in PATTERNS for tokens, hidden in ((1, 8), (64, 2880), (3, 40), (17, 1024), (0, 16))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_processes(ranks, size, dtype):
    digests = ranks(size).run(run_cases, dtype, "cpu", CASES)
    assert all(one == digests[0] for one in digests)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_threads(size):
    """Check other numbers of ranks, with threads."""
    cases = [(1, 5, 64), (0, 9, 256), (11, 2, 128)]

    def work(comm):
        workspace = make_workspace(comm, 16, 256, torch.bfloat16, "cpu")
        found = []
        for seed, (pattern, tokens, hidden) in enumerate(cases):
            made = call(workspace, pattern, inputs(comm.Get_rank(), tokens, hidden, torch.bfloat16, "cpu", seed))
            check(made, expected(size, pattern, (tokens, hidden), torch.bfloat16, seed), torch.bfloat16)
            found.append(digest(made))
        workspace.destroy()
        return found

    digests = call_on_ranks(size, work)
    assert all(one == digests[0] for one in digests)


def many_shapes(comm, count):
    """Run random shapes, some ranks late, against a sum in float64; the flags' counters wrap on the way."""
    rank, world = comm.Get_rank(), comm.Get_size()
    workspace = make_workspace(comm, 8, 512, torch.float32, "cpu")
    import ctypes

    for ptr in workspace._memory.ptrs:  # each rank writes the same: 2^32 - 100 calls are done
        ctypes.c_uint32.from_address(ptr).value = 2**32 - 100
    comm.barrier()
    order, own = random.Random(7), random.Random(rank)
    for i in range(count):
        tokens, hidden = order.randrange(9), 4 * order.randrange(1, 129)
        parts = [torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(17 * i + r)) for r in range(world)]
        if own.random() < 0.05:
            time.sleep(0.002 * own.random())
        found = allreduce_fusion(parts[rank], workspace, P.kAllReduce)
        torch.testing.assert_close(found.double(), torch.stack(parts).double().sum(0), rtol=1e-6, atol=1e-6)
    workspace.destroy()


def test_a_thousand_shapes_and_counters_that_wrap(ranks):
    ranks(4).run(many_shapes, 1000)


def test_sums_over_experts_and_packed_scales(ranks):
    digests = ranks(4).run(more_patterns, "cpu")
    assert all(one == digests[0] for one in digests)


def special_values(comm):
    workspace = make_workspace(comm, 1, 16, torch.float32, "cpu")
    x = torch.tensor([[-0.0, 0.0, float("inf"), float("nan"), -1.0, 3e38, 1e-45, -1e-45] * 2])
    found = allreduce_fusion(x, workspace, P.kAllReduce)
    workspace.destroy()
    return found.view(torch.int32).tolist()[0][:8]


def test_zeros_infinities_and_nan(ranks):
    wanted = torch.tensor([0.0, 0.0, float("inf"), float("nan"), -2.0, float("inf"), 2.8e-45, -2.8e-45])
    for found in ranks(2).run(special_values):
        values = torch.tensor(found, dtype=torch.int32).view(torch.float32)
        torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)
        assert found[0] == 0, "-0.0 is +0.0"


def in_place(comm):
    """Call as vLLM does: the norm overwrites the input and the residual its input; and the sum goes to the input."""
    dtype, shape = torch.bfloat16, (7, 64)
    workspace = make_workspace(comm, *shape, dtype, "cpu")
    x, residual, gamma = inputs(comm.Get_rank(), *shape, dtype, "cpu")
    fused = {"residual_in": residual, "residual_out": residual, "norm_out": x, "rms_gamma": gamma}
    assert allreduce_fusion(x, workspace, P.kARResidualRMSNorm, **fused) is x
    check({"residual_out": residual, "norm_out": x}, expected(comm.Get_size(), 1, shape, dtype, 0), dtype)

    x, residual, gamma = inputs(comm.Get_rank(), *shape, dtype, "cpu")
    norm = torch.empty_like(x)
    zero = torch.zeros_like(x)
    allreduce_fusion(x, workspace, 1, residual_in=zero, residual_out=x, norm_out=norm, rms_gamma=gamma)
    check({"output": x}, expected(comm.Get_size(), 0, shape, dtype, 0), dtype)
    workspace.destroy()


def test_in_place(ranks):
    ranks(2).run(in_place)


def two_workspaces(comm):
    first, second = (make_workspace(comm, 4, 32, torch.float32, "cpu") for _ in range(2))
    one = torch.ones(4, 32)
    for _ in range(3):
        assert allreduce_fusion(one, first, 0).unique().tolist() == [2.0]
        assert allreduce_fusion(one * 3, second, 0).unique().tolist() == [6.0]
    first.destroy()
    assert allreduce_fusion(one, second, 0).unique().tolist() == [2.0]
    second.destroy()
    second.destroy()
    try:
        allreduce_fusion(one, second, 0)
    except RuntimeError as error:
        return str(error)


def test_two_workspaces_and_destruction(ranks):
    assert ranks(2).run(two_workspaces) == ["allreduce_fusion: workspace is not attached; it was destroyed"] * 2


def requests_that_differ(comm, change):
    workspace = make_workspace(comm, 8, 64, torch.bfloat16, "cpu")
    odd = comm.Get_rank() == 1
    dtype = torch.float16 if change == "dtype" and odd else torch.bfloat16
    x, residual, gamma = inputs(0, 6 if change == "shape" and odd else 5, 64, dtype, "cpu")
    pattern = 1
    made = {"residual_out": torch.full_like(x, 7), "norm_out": torch.full_like(x, 7)}
    if change == "pattern" and odd:
        pattern, made["quant_out"] = 4, torch.empty_like(x, dtype=torch.float8_e4m3fn)
    try:
        allreduce_fusion(x, workspace, pattern, residual_in=residual, rms_gamma=gamma, **made)
    except ValueError as error:
        text = str(error)
    untouched = all((made[name] == 7).all().item() for name in ("residual_out", "norm_out"))
    again = allreduce_fusion(torch.ones(1, 64, dtype=torch.bfloat16), workspace, 0)  # the workspace still works
    workspace.destroy()
    return untouched, again[0, 0].item(), text


@pytest.mark.parametrize("change", ["shape", "pattern", "dtype"])
def test_ranks_that_ask_for_different_things(ranks, change):
    text = "allreduce_fusion: shape, dtype and pattern must be equal on all ranks in call 1, got other ones"
    assert ranks(2).run(requests_that_differ, change) == [(True, 2.0, text)] * 2


def absent(comm, culprit):
    with time_limit(0.4):
        workspace = make_workspace(comm, 8, 64, torch.bfloat16, "cpu")
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    allreduce_fusion(x, workspace, 0)
    comm.barrier()
    texts, start = [], time.monotonic()
    if comm.Get_rank() != culprit:
        for _ in range(2):  # once it has failed, the workspace fails at once
            try:
                allreduce_fusion(x, workspace, 0)
            except CommTimeoutError as error:
                texts.append(str(error))
    took = time.monotonic() - start
    comm.barrier()
    workspace.destroy()
    return took, texts


def test_a_rank_that_does_not_come(ranks):
    outcomes = ranks(4).run(absent, 2)
    for rank, (took, texts) in enumerate(outcomes):
        if rank != 2:
            assert took < 5 and len(texts) == 2 and texts[0] == texts[1]
            assert "rank 2 must enter call 2" in texts[0]


def die(comm):
    with time_limit(0.5):
        workspace = make_workspace(comm, 8, 64, torch.bfloat16, "cpu")
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    allreduce_fusion(x, workspace, 0)
    if comm.Get_rank() == 1:
        os._exit(9)
    try:
        for _ in range(3):  # the memory of the dead rank is still mapped
            allreduce_fusion(x, workspace, 0)
    except CommTimeoutError as error:
        workspace.destroy()
        return str(error)


def test_a_rank_that_dies():
    group = Ranks(3)
    try:
        outcomes = group.outcomes(die)
    finally:
        group.close()
    assert outcomes[1].text == "the process has ended"
    for rank in (0, 2):
        assert "rank 1 must enter call 2" in outcomes[rank]


def test_a_late_rank_is_waited_for():
    def work(comm):
        workspace = make_workspace(comm, 1, 8, torch.float32, "cpu")
        if comm.Get_rank() == 1:
            time.sleep(0.3)  # longer than one slice of waiting
        found = allreduce_fusion(torch.ones(1, 8), workspace, 0)
        workspace.destroy()
        return found[0, 0].item()

    assert call_on_ranks(2, work) == [2.0, 2.0]


def alone(tokens=4, hidden=64, dtype=torch.bfloat16):
    return call_on_ranks(1, lambda comm: make_workspace(comm, tokens, hidden, dtype, "cpu"))[0]


@pytest.fixture
def workspace():
    made = alone()
    yield made
    made.destroy()


@pytest.mark.parametrize("name", ["residual_in", "residual_out", "rms_gamma", "norm_out", "quant_out", "scale_out"])
def test_arguments_that_are_required(workspace, name):
    x, residual, gamma = inputs(0, 4, 64, torch.bfloat16, "cpu")
    given = {
        "residual_in": residual,
        "residual_out": residual.clone(),
        "rms_gamma": gamma,
        "norm_out": x.clone(),
        "quant_out": x.to(torch.float8_e4m3fn),
        "scale_out": torch.empty(4, 1),
    }
    given[name] = None
    with pytest.raises(ValueError, match=f"{name} is required"):
        allreduce_fusion(x, workspace, DYNAMIC[1], **given)


def test_bad_arguments(workspace):
    def fails(kind, text, x, pattern=0, **given):
        with pytest.raises(kind, match=text):
            allreduce_fusion(x, workspace, pattern, **given)

    x = torch.ones(4, 64, dtype=torch.bfloat16)
    fails(
        ValueError,
        r"input must fit in the workspace \(4 tokens of hidden 64\), got 5 tokens",
        torch.ones_like(x[:1]).repeat(5, 1),
    )
    fails(ValueError, "rows of a positive multiple of 16 bytes, got 14 bytes", x[:, :7].contiguous())
    fails(ValueError, "input must be contiguous", x[:, ::2])
    fails(ValueError, "input must be of the dtypes of workspace", x.float())
    fails(ValueError, "output must have shape", x, output=x[:2])
    fails(
        ValueError,
        "residual_out must not share memory with norm_out|norm_out must not share memory",
        x,
        1,
        residual_in=x.clone(),
        residual_out=(same := x.clone()),
        norm_out=same,
        rms_gamma=x[0].clone(),
    )
    fails(
        ValueError,
        "rms_gamma.shape.0. must be 64",
        x,
        1,
        residual_in=x.clone(),
        residual_out=x.clone(),
        norm_out=x.clone(),
        rms_gamma=x[0, :32].contiguous(),
    )
    fails(ValueError, "pattern must be a number", x, 99)
    fails(ValueError, "requires an MNNVLCuteDSLAllReduceFusionWorkspace", x, 12)
    with pytest.raises(TypeError, match="Unknown workspace type"):
        allreduce_fusion(x, object(), 0)
    assert torch.equal(allreduce_fusion(x, workspace, 0), x)  # nothing is broken


def test_sizes_that_fit(workspace, caplog):
    fits = workspace.is_buffer_size_sufficient
    assert fits(1, 4, 64, torch.bfloat16) and fits(tp_size=1, num_tokens=8, hidden_dim=32, dtype=torch.float16)
    assert fits(1, 4, 64, torch.bfloat16, use_oneshot=True) and not caplog.records
    assert (
        not fits(1, 5, 64, torch.bfloat16) and not fits(2, 1, 64, torch.bfloat16) and not fits(1, 1, 8, torch.float32)
    )
    assert len(caplog.records) == 3 and "does not serve 5 x 64 elements" in caplog.text


def test_checkpoints_are_refused(workspace):
    for call_it in (workspace.checkpoint_prepare, lambda: workspace.checkpoint_restore(None)):
        with pytest.raises(NotImplementedError, match="torch symmetric memory"):
            call_it()


def test_a_workspace_that_is_forgotten_warns():
    made = alone()
    with pytest.warns(ResourceWarning, match="was not destroyed"):
        made.__del__()
    made.destroy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.__del__()
