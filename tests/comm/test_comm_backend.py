# SPDX-License-Identifier: Apache-2.0
"""Backends that exchange objects, splits of groups, votes, and set-up that fails on all ranks alike."""

from __future__ import annotations

import sys

import pytest
import torch

from flashinfer.comm.abstractions import CommBackend
from flashinfer.comm.comm_backend import MPIBackend, MpiComm, TorchDistBackend, _split_partition
from flashinfer.comm.memory.transaction import Transaction
from flashinfer.comm.mnnvl import all_ranks_agree, all_ranks_support_mnnvl

from .foreign import EngineBackend


def test_partition_of_a_split():
    assert _split_partition([(1, 0, 0), (0, 5, 1), (1, -1, 2), (0, 5, 3)]) == [[1, 3], [2, 0]]


def test_backends_are_recognised_by_their_methods():
    assert isinstance(EngineBackend(None), CommBackend) and isinstance(MPIBackend(), CommBackend)
    assert not isinstance(object(), CommBackend)


def test_backend_needs_torch_distributed():
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized"):
        TorchDistBackend()


def test_backend_of_one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        backend = TorchDistBackend()
        assert isinstance(backend, CommBackend) and (backend.Get_rank(), backend.Get_size()) == (0, 1)
        assert backend.allgather({"a": 1}) == ({"a": 1},) and backend.bcast("x", 0) == "x"
        backend.barrier()
        assert backend.Split(0, 0).allgather(3) == (3,)
    finally:
        torch.distributed.destroy_process_group()


def split_twice(comm):
    """Split four ranks by parity in reverse order; split one half alone, while the other half is elsewhere."""
    rank = comm.Get_rank()
    half = comm.Split(rank % 2, -rank)
    seen = [half.allgather(rank), half.bcast(rank, 1)]
    if rank % 2 == 0:
        alone = half.Split(rank, 0)
        seen.append(alone.allgather(rank))
    comm.barrier()
    return seen


def test_splits(ranks):
    assert ranks(4).run(split_twice) == [[(2, 0), 0, (0,)], [(3, 1), 1], [(2, 0), 0, (2,)], [(3, 1), 1]]


def vote(comm, dissenter):
    foreign = EngineBackend(comm)
    mine = comm.Get_rank() != dissenter
    return (
        all_ranks_agree(foreign, mine),
        all_ranks_support_mnnvl(mine, comm.Get_size(), foreign),
        all_ranks_support_mnnvl(mine, comm.Get_size()),
    )


def test_votes(ranks):
    assert ranks(2).run(vote, None) == [(True, True, True)] * 2
    assert ranks(2).run(vote, 1) == [(False, False, False)] * 2


def test_votes_of_one_rank_need_no_backend():
    assert all_ranks_support_mnnvl(True, 1) is True and all_ranks_support_mnnvl(False, 1) is False


def test_backend_of_another_size_supports_nothing(ranks):
    class Pair:
        def Get_size(self):
            return 2

    with pytest.warns(UserWarning, match="comm_backend must have world_size = 4 ranks, got 2"):
        assert all_ranks_support_mnnvl(True, 4, Pair()) is False


def fail_in(comm, culprit, stage, kind):
    log = []
    with Transaction(EngineBackend(comm), "make") as transaction:
        for name in ("first", "second", "third"):
            log.append(name)
            transaction.on_failure(log.append, f"undo {name}")

            def work(name=name):
                if (comm.Get_rank(), name) == (culprit, stage):
                    raise kind(f"no {name}")
                return comm.Get_rank()

            try:
                assert transaction.stage(name, work) == list(range(comm.Get_size()))
            except kind as error:
                transaction.__exit__()
                return log, str(error)
        transaction.commit()
    return log, ""


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failing_stage_fails_on_all_ranks(ranks, culprit):
    text = f"make: rank {culprit} failed to second (no second); all ranks gave back what they had"
    log = ["first", "second", "undo second", "undo first"]
    assert ranks(2).run(fail_in, culprit, "second", MemoryError) == [(log, text)] * 2
    assert ranks(2).run(fail_in, culprit, None, OSError) == [(["first", "second", "third"], "")] * 2


def disagree(comm):
    def agree(values):
        if len(set(values)) > 1:
            raise ValueError(f"sizes must be equal, got {values}")

    with Transaction(comm, "make") as transaction:
        transaction.stage("compare", lambda: comm.Get_rank(), agree)


def test_ranks_that_do_not_fit_each_other(ranks):
    for failure in ranks(2).fail(disagree):
        assert failure.classes[0] == "ValueError" and failure.text == "sizes must be equal, got [0, 1]"


def test_mpi_is_imported_by_the_first_call(monkeypatch):
    monkeypatch.setattr(MpiComm, "_comm", None)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    backend = MPIBackend()
    with pytest.raises(ImportError, match="mpi4py must be installed"):
        backend.Get_rank()


def test_mpi_of_one_rank(monkeypatch):
    """Check the calls on a communicator with the methods of mpi4py; with mpi4py itself where it is installed."""

    class OneRank:
        def Get_rank(self):
            return 0

        def Get_size(self):
            return 1

        def allgather(self, data):
            return [data]

        def bcast(self, data, root):
            return data

        def Barrier(self):
            pass

        def Split(self, color, key):
            return OneRank()

    monkeypatch.setattr(MpiComm, "_comm", None)
    MpiComm.set_mpi_comm(OneRank())
    backend = MPIBackend()
    before = backend._mpicomm
    split = backend.Split(0, 0)
    assert split is not backend and backend._mpicomm is before and split.allgather(4) == (4,)
    assert (backend.Get_rank(), backend.Get_size(), backend.bcast("x", 0)) == (0, 1, "x")
    backend.barrier()
