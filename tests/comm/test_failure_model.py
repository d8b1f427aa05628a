# SPDX-License-Identifier: Apache-2.0
"""Failures and what follows: the sentences of docs/communication.md that no other file tests."""

from __future__ import annotations

import ctypes
import os
import sys
import time

import pytest
import torch

from flashinfer.comm import CommTimeoutError, allreduce_fusion, create_allreduce_fusion_workspace
from flashinfer.comm.local_ranks import call_on_ranks, local_comms

from .calls import call, check, digest, expected, inputs, make_workspace
from .exchanges import EXPERTS, HIDDEN, MOST, TOP_K, check_combined, exchange, make_exchange, tokens_of
from .ranks import Ranks, time_limit


def subgroup(comm):
    """Create in one half of the ranks, while the other half does nothing at all."""
    half = comm.Split(comm.Get_rank() % 2, comm.Get_rank())
    start, total = time.monotonic(), None
    if comm.Get_rank() % 2 == 0:
        workspace = create_allreduce_fusion_workspace(
            "auto", half.Get_size(), half.Get_rank(), 4, 64, torch.float32, group=half._group, device="cpu"
        )
        total = allreduce_fusion(torch.full((1, 64), 1.0 + comm.Get_rank()), workspace, 0)[0, 0].item()
        workspace.destroy()
    took = time.monotonic() - start
    comm.barrier()
    return total, took


def test_nobody_outside_of_the_group_is_waited_for(ranks):
    outcomes = ranks(4).run(subgroup)
    assert [total for total, _ in outcomes] == [4.0, None, 4.0, None]
    assert all(took < 5 for _, took in outcomes)


def one_rank_raises(comm):
    """Let rank 1 pass a wrong argument: it raises at once, and the others learn who did not come."""
    with time_limit(0.3):
        workspace = make_workspace(comm, 4, 64, torch.bfloat16, "cpu")
    x, residual, gamma = inputs(comm.Get_rank(), 4, 64, torch.bfloat16, "cpu")
    fused = {"residual_in": residual, "residual_out": residual, "norm_out": x, "rms_gamma": gamma}
    if comm.Get_rank() == 1:
        del fused["residual_in"]
    try:
        allreduce_fusion(x, workspace, 1, **fused)
    except (ValueError, CommTimeoutError) as error:
        text = str(error)
    comm.barrier()
    workspace.destroy()
    return text


def test_an_exception_on_one_rank(ranks):
    first, second = ranks(2).run(one_rank_raises)
    assert "residual_in is required for pattern 1" in second
    assert "rank 1 must enter call 1 within 0.3 s, rank 0 got no input of it" in first


def destroyed_in_any_order(comm):
    """Destroy as soon as the own call is done, each rank first in turn; peers still read what it has shown."""
    rank, world = comm.Get_rank(), comm.Get_size()
    for first in range(world):
        workspace = make_workspace(comm, 64, 512, torch.float32, "cpu")
        for repeat in range(3):
            if rank != first:
                time.sleep(0.002)
            total = allreduce_fusion(torch.full((64, 512), float(repeat + rank)), workspace, 0)
            assert (total == world * repeat + sum(range(world))).all()
        workspace.destroy()
    return True


def test_destruction_in_any_order(ranks):
    assert all(ranks(4).run(destroyed_in_any_order))


def forked(comm):
    workspace = make_workspace(comm, 4, 64, torch.float32, "cpu")
    child = os.fork()
    if child == 0:
        try:
            allreduce_fusion(torch.ones(1, 64), workspace, 0)
        except RuntimeError as error:
            workspace.destroy()  # gives nothing back here
            os._exit(0 if "the process must be the one that made the memory, got a fork of it" in str(error) else 1)
        os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    comm.barrier()
    total = allreduce_fusion(torch.ones(1, 64), workspace, 0)[0, 0].item()
    workspace.destroy()
    return status, total


def test_use_in_a_fork(ranks):
    assert ranks(2).run(forked) == [(0, 2.0)] * 2


def full(comm):
    """Call with as many tokens as the workspace holds, 8,192 of 8,192, and with one more."""
    workspace = make_workspace(comm, 8192, 16, torch.bfloat16, "cpu")
    for one_shot in (None, True, False):
        found = call(workspace, 1, inputs(comm.Get_rank(), 8192, 16, torch.bfloat16, "cpu"), use_oneshot=one_shot)
        check(found, expected(2, 1, (8192, 16), torch.bfloat16, 0), torch.bfloat16)
    with pytest.raises(ValueError, match=r"\(8192 tokens of hidden 16\), got 8193 tokens"):
        allreduce_fusion(torch.ones(8193, 16).bfloat16(), workspace, 0)
    workspace.destroy()


def test_a_full_workspace(ranks):
    ranks(2).run(full)


def repeated(comm):
    """Run the same calls twice, and once with ranks that are late; the bits are the same."""
    workspace, digests = make_workspace(comm, 33, 320, torch.float16, "cpu"), []
    for repeat in range(3):
        if repeat == 2 and comm.Get_rank() == 0:
            time.sleep(0.01)
        found = call(workspace, 11, inputs(comm.Get_rank(), 33, 320, torch.float16, "cpu"))
        digests.append(digest(found))
    workspace.destroy()
    return digests


def test_equal_bits_from_run_to_run(ranks):
    outcomes = ranks(4).run(repeated)
    assert len({one for digests in outcomes for one in digests}) == 1


def test_addresses_inside_of_a_vector():
    """Take rows that begin at any address: right results here; on CUDA an error, instead of a crash."""
    whole = torch.randn(65).bfloat16()
    x = whole[1:].view(1, 64)
    workspace = make_workspace(local_comms(1)[0], 4, 64, torch.bfloat16, "cpu")
    assert torch.equal(allreduce_fusion(x, workspace, 0), x)
    workspace.destroy()
    if torch.cuda.is_available():
        workspace = make_workspace(local_comms(1)[0], 4, 64, torch.bfloat16, "cuda")
        with pytest.raises(ValueError, match="input must be aligned to 16 bytes"):
            allreduce_fusion(whole.cuda()[1:].view(1, 64), workspace, 0)
        workspace.destroy()


def test_the_words_of_the_watchdog():
    """Name rank, call and row from the record that a kernel leaves on the host; the CPU stands in for CUDA."""
    workspace = make_workspace(local_comms(1)[0], 4, 64, torch.float32, "cpu")
    workspace._record = torch.tensor([1, 3, -2, 17], dtype=torch.int32)
    workspace._found = ctypes.c_int32.from_address(workspace._record.data_ptr())
    for _ in range(2):
        with pytest.raises(
            CommTimeoutError, match=r"rank 3 must push its rows .* no data of row 17 in call 4294967294"
        ):
            workspace.check()
    workspace.destroy()


def wrapped_exchanges(comm):
    """Exchange tokens while the number of the exchange wraps."""
    rank, world = comm.Get_rank(), comm.Get_size()
    alltoall = make_exchange(comm, MOST, TOP_K, EXPERTS, HIDDEN, "cpu")
    head = alltoall.workspace[rank]
    meta = alltoall.metainfo.tolist()
    words = [0, *[meta[flags] + 4 * r for flags in (4, 5) for r in range(world)]]  # call, dispatch and combine flags
    for at in words:
        head[at : at + 4].view(torch.int32)[0] = -2
    comm.barrier()
    own = tokens_of(rank, 5, EXPERTS, TOP_K, HIDDEN, "random", "cpu")
    for _ in range(4):
        check_combined(own, exchange(alltoall, own, 8)[1], EXPERTS, world)
    calls = head[:4].view(torch.int32).item()
    comm.barrier()
    alltoall.destroy()
    return calls


def test_numbers_of_exchanges_wrap(ranks):
    assert ranks(2).run(wrapped_exchanges) == [2, 2]


def dies_between_dispatch_and_combine(comm):
    with time_limit(0.5):
        alltoall = make_exchange(comm, MOST, TOP_K, EXPERTS, HIDDEN, "cpu")
    own = tokens_of(comm.Get_rank(), 3, EXPERTS, TOP_K, HIDDEN, "random", "cpu")
    views = alltoall.dispatch(own.ids, list(own), 8)
    if comm.Get_rank() == 1:
        os._exit(9)
    try:
        alltoall.combine(torch.ones_like(views[0]), 8)
    except CommTimeoutError as error:
        return str(error)


def test_a_rank_that_dies_between_dispatch_and_combine():
    group = Ranks(2)
    try:
        first, second = group.outcomes(dies_between_dispatch_and_combine)
    finally:
        group.close()
    assert second.text == "the process has ended"
    assert "rank 1 must show its results within 0.5 s, rank 0 got nothing of call 1" in first


def test_a_rank_that_raises_lets_go_of_threads():
    """End soon, with the error of the rank that failed, where others wait for it in the backend."""
    start = time.monotonic()

    def work(comm):
        if comm.Get_rank() == 1:
            raise MemoryError("nothing left")
        comm.barrier()

    with pytest.raises(MemoryError, match="nothing left"):
        call_on_ranks(3, work)
    assert time.monotonic() - start < 5


@pytest.fixture
def hasty_threads():
    """Let threads take turns after microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_have_tables_of_their_own(hasty_threads):
    """Create, use and destroy on ranks that are threads, again and again: none takes what is another's."""

    def work(comm):
        rank, world = comm.Get_rank(), comm.Get_size()
        for repeat in range(8):
            alltoall = make_exchange(comm, 8, TOP_K, EXPERTS, 16, "cpu")
            assert (alltoall.ep_rank, alltoall.mnnvl_mem.memory.rank) == (rank, rank)
            own = tokens_of(rank, 2 + repeat % 3, EXPERTS, TOP_K, 16, "random", "cpu")
            check_combined(own, exchange(alltoall, own, 8)[1], EXPERTS, world)
            workspace = make_workspace(comm, 2, 16, torch.float32, "cpu")
            assert allreduce_fusion(torch.full((1, 16), 1.0), workspace, 0)[0, 0].item() == world
            comm.barrier()
            alltoall.destroy()
            workspace.destroy()

    for _ in range(3):
        call_on_ranks(4, work)
