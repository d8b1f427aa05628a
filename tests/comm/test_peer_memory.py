# SPDX-License-Identifier: Apache-2.0
"""Memory that all ranks see, and its creation: on all ranks or on none, with nothing left behind."""

from __future__ import annotations

import ctypes
import os
import time

import pytest

from flashinfer.comm.local_ranks import call_on_ranks
from flashinfer.comm.memory.peers import create_peer_memory
from flashinfer.comm.memory.transaction import Transaction

from .foreign import EngineBackend
from .ranks import held

STAGES = ("check arguments", "allocate memory", "send descriptors", "map the memory of peers", "initialise memory")


def write_and_read(comm):
    before = held()
    rank, size = comm.Get_rank(), comm.Get_size()
    memory = create_peer_memory(EngineBackend(comm), 4096, "cpu", initialise=lambda own: own.fill_(7))
    assert memory.provider == "host" and memory.nbytes == 4096 and memory.own.tolist() == [7] * 4096
    assert len(os.listdir("/proc/self/fd")) == before[0], "no descriptor stays open"
    comm.barrier()
    for peer, ptr in enumerate(memory.ptrs):
        ctypes.memset(ptr + rank, 10 * peer + rank, 1)
    comm.barrier()
    seen = memory.own[: size + 1].tolist()
    comm.barrier()
    memory.close()
    memory.close()
    assert held() == before
    return seen


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_sees_every_memory(ranks, size):
    assert ranks(size).run(write_and_read) == [[10 * own + peer for peer in range(size)] + [7] for own in range(size)]


def fail_at(comm, culprit, stage):
    def before(rank, name):
        if (rank, name) == (culprit, stage):
            raise MemoryError("nothing left")

    before_all = held()
    Transaction.before_stage = staticmethod(before)
    try:
        create_peer_memory(comm, 1 << 20, "cpu")
    except MemoryError as error:
        text = str(error)
    finally:
        Transaction.before_stage = staticmethod(lambda rank, name: None)
    assert held() == before_all
    memory = create_peer_memory(comm, 64, "cpu")  # the group is as good as before
    memory.close()
    return text


@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_in_any_stage_on_any_rank(ranks, stage):
    for culprit in range(4):
        text = f"create_peer_memory: rank {culprit} failed to {stage} (nothing left); all ranks gave back what they had"
        assert ranks(4).run(fail_at, culprit, stage) == [text] * 4


def sizes_that_differ(comm):
    create_peer_memory(comm, 64 + 64 * (comm.Get_rank() == 1), "cpu", op="make")


def test_sizes_must_be_equal(ranks):
    for failure in ranks(2).fail(sizes_that_differ):
        assert failure.classes[:2] == ("ArgumentError", "ValueError")
        assert failure.text == "make: nbytes must be equal on all ranks, got 64 on rank 0; 128 on rank 1"


def hosts_that_differ(comm):
    from flashinfer.comm.memory import peers

    original, before, start = peers._host_name, held(), time.monotonic()
    peers._host_name = lambda: f"node{comm.Get_rank()}"
    try:
        create_peer_memory(comm, 1 << 20, "cpu", op="make")
    finally:
        peers._host_name = original
        assert held() == before and time.monotonic() - start < 1, "one vote, before anything is allocated"


def test_ranks_of_two_hosts(ranks):
    for failure in ranks(2).fail(hosts_that_differ):
        assert "within one host only; use NCCL between hosts" in failure.text
        assert "node0 on rank 0; node1 on rank 1" in failure.text


def too_much(comm):
    before = held()
    try:
        create_peer_memory(comm, 1 << 60, "cpu")
    finally:
        assert held() == before


def test_more_memory_than_there_is(ranks):
    for failure in ranks(2).fail(too_much):
        assert "MemoryError" in failure.classes and "rank 0 failed to allocate memory" in failure.text
        assert "must fit in what the host has left" in failure.text


def use_in_child(comm):
    memory = create_peer_memory(comm, 64, "cpu", initialise=lambda own: own.fill_(3))
    child = os.fork()
    if child == 0:
        try:
            memory.close()  # does nothing here
            memory.check("use")
        except RuntimeError as error:
            os._exit(0 if "got a fork of it" in str(error) and not memory.closed else 1)
        os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    kept = memory.own[0].item()
    memory.close()
    try:
        memory.check("use")
    except RuntimeError as error:
        return status, kept, str(error)


def test_use_in_a_fork_and_after_close(ranks):
    text = "use: the memory shared between ranks must be attached, got one that is not attached"
    assert ranks(2).run(use_in_child) == [(0, 3, text)] * 2


def two_groups(comm):
    """Create in both halves at the same moment; nobody waits for the other half."""
    half = comm.Split(comm.Get_rank() % 2, 0)
    memory = create_peer_memory(half, 64 * (1 + comm.Get_rank() % 2), "cpu")
    sizes = (memory.world_size, memory.nbytes)
    memory.close()
    return sizes


def test_two_groups_at_once(ranks):
    assert ranks(4).run(two_groups) == [(2, 64), (2, 128)] * 2


def test_ranks_of_one_process(device):
    def work(comm):
        memory = create_peer_memory(comm, 256, device, initialise=lambda own: own.fill_(comm.Get_rank()))
        assert memory.provider == "local" and memory.ptrs[comm.Get_rank()] == memory.own.data_ptr()
        return memory

    made = call_on_ranks(3, work)
    assert [memory.own[0].item() for memory in made] == [0, 1, 2]
    assert len({memory.ptrs for memory in made}) == 1


def test_a_fault_among_ranks_of_one_process(monkeypatch):
    def before(rank, name):
        if (rank, name) == (1, "map the memory of peers"):
            raise MemoryError("no")

    monkeypatch.setattr(Transaction, "before_stage", staticmethod(before))
    with pytest.raises(MemoryError, match="rank 1 failed to map the memory of peers"):
        call_on_ranks(2, lambda comm: create_peer_memory(comm, 64, "cpu"))
