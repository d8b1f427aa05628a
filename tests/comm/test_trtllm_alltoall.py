# SPDX-License-Identifier: Apache-2.0
"""The two-sided exchange of tokens: rows by index, what goes where, and the calls of engines."""

from __future__ import annotations

import random
import time
import warnings

import pytest
import torch

from flashinfer.comm import CommTimeoutError, Mapping, trtllm_alltoall
from flashinfer.comm.local_ranks import call_on_ranks
from flashinfer.comm.mnnvl import MnnvlConfig, MnnvlMemory
from flashinfer.comm.trtllm_alltoall import (
    MnnvlMoe,
    get_moe_commworkspace_size_per_rank,
    moe_comm,
    moe_comm_prepare_indices,
    moe_local_gather,
    set_moe_max_usable_sm_count,
)

from .exchanges import rank_of
from .foreign import EngineBackend
from .ranks import time_limit

INT = torch.int32


def space_of(comm, name="get_moe_workspaces"):
    world = comm.Get_size()
    mapping = Mapping(world, comm.Get_rank(), world, tp_size=world)
    with pytest.warns(DeprecationWarning, match="NVLinkTwoSidedAlltoAll"):
        return getattr(MnnvlMoe, name)(mapping, MnnvlConfig(comm), device="cpu")


def permuted_rows(comm):
    """Send random rows in random order to random places, more than the buffers hold, several times."""
    rank, world = comm.Get_rank(), comm.Get_size()
    space = space_of(comm)
    for seed, (dtype, width, most) in enumerate([(torch.float16, 8, 50), (torch.bfloat16, 4096, 150), (INT, 4, 3)]):
        order = random.Random(seed)
        counts = [[order.randrange(most) for _ in range(world)] for _ in range(world)]  # from, to
        sources = [[[order.randrange(90) for _ in range(n)] for n in row] for row in counts]
        inputs = [
            torch.randint(0, 100, (90, width), generator=torch.Generator().manual_seed(r)).to(dtype)
            for r in range(world)
        ]
        received = sum(counts[r][rank] for r in range(world))
        places = torch.randperm(received + 5, generator=torch.Generator().manual_seed(seed))[:received].to(INT)
        out = torch.full((received + 5, width), 7).to(dtype)
        sums = torch.tensor(counts[rank], dtype=INT).cumsum(0).to(INT)
        sends = torch.tensor([i for one in sources[rank] for i in one], dtype=INT)
        recv_sums = torch.tensor([counts[r][rank] for r in range(world)]).cumsum(0).to(INT)
        moe_comm(inputs[rank], sums, sends, out, recv_sums, places, space, rank, world)
        want = torch.full_like(out, 7)
        rows = [inputs[r][i] for r in range(world) for i in sources[r][rank]]
        if rows:
            want[places.long()] = torch.stack(rows)
        assert torch.equal(out, want)
    comm.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_processes(ranks, size):
    ranks(size).run(permuted_rows)


def test_threads():
    call_on_ranks(3, permuted_rows)


def fewer_rows(comm):
    """Let rank 1 send less than rank 0 expects."""
    rank = comm.Get_rank()
    memory = MnnvlMemory(
        Mapping(2, rank, 2, tp_size=2), 8 * get_moe_commworkspace_size_per_rank(2), comm=comm, device="cpu"
    )
    space = memory.as_torch_strided_tensor(torch.uint64)
    none = torch.zeros(2, dtype=INT)
    one = torch.tensor([0, 1], dtype=INT) if rank == 0 else none
    text, start = "", time.monotonic()
    try:
        with time_limit(0.3):
            moe_comm(torch.ones(1, 4), none, none[:1], torch.empty(1, 4), one, none[:1], space, rank, 2)
    except CommTimeoutError as error:
        text = str(error)
    took = time.monotonic() - start
    comm.barrier()
    del space
    memory.close()
    return took, text


def test_a_rank_that_sends_too_few_rows(ranks):
    (took, text), (_, other) = ranks(2).run(fewer_rows)
    assert took < 3 and other == ""
    assert "moe_comm: rank 1 must send its tokens within" in text


def engine_calls(comm):
    """Call as vLLM does: prepare, one exchange per payload, combine."""
    comm = EngineBackend(comm)
    rank, world = comm.Get_rank(), comm.Get_size()
    space, prepare = space_of(comm), space_of(comm, "get_moe_prepare_workspace")
    assert space_of(comm).data_ptr() == space.data_ptr() != prepare.data_ptr()
    experts, top_k, most, hidden = 4 * world, 3, 6, 24
    for counts in ([6, 1, 0, 4], [0, 0, 0, 0], [2, 6, 6, 6]):
        ids = [
            torch.stack(
                [torch.randperm(experts, generator=torch.Generator().manual_seed(10 * r + t))[:top_k] for t in range(6)]
            )
            for r in range(world)
        ]
        tokens = [torch.randn(6, hidden, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(world)]
        scales = [torch.rand(6, top_k, generator=torch.Generator().manual_seed(r)) for r in range(world)]
        n = counts[rank]
        statistics = torch.full((experts,), rank, dtype=INT)
        info, local_ids, local_scales, gathered = MnnvlMoe.mnnvl_moe_alltoallv_prepare_without_allgather(
            *(ids[rank][:n].to(INT), scales[rank][:n], statistics, prepare, most, rank, world, experts, experts, top_k)
        )
        assert gathered[:, 0].tolist() == list(range(world))
        x = MnnvlMoe.mnnvl_moe_alltoallv(tokens[rank][:n], info, space, rank, world)
        odd = MnnvlMoe.mnnvl_moe_alltoallv(tokens[rank][:n, :3].contiguous(), info, space, rank, world)
        want_x, want_ids, want_scales = [], [], []
        for source in range(world):
            for t in range(counts[source]):
                owners = rank_of(ids[source][t], experts, world)
                if (owners == rank).any():
                    want_x.append(tokens[source][t])
                    want_ids.append(torch.where(owners == rank, ids[source][t], experts))
                    want_scales.append(scales[source][t])
        count = len(want_x)
        assert (
            info.local_token_allocation_count == most * world == len(x)
            and int(info.recv_rank_count_cumsum[-1]) == count
        )
        assert (local_ids[count:] == experts).all() and (local_scales[count:] == 0).all()
        if count:
            assert torch.equal(x[:count], torch.stack(want_x)) and torch.equal(odd[:count], torch.stack(want_x)[:, :3])
            assert torch.equal(local_ids[:count], torch.stack(want_ids).to(INT))
            assert torch.equal(local_scales[:count], torch.stack(want_scales))
        out = MnnvlMoe.mnnvl_moe_alltoallv_combine(
            x * (rank + 1), info, space, ep_rank=rank, ep_size=world, top_k=top_k, token_count=n
        )
        owners = rank_of(ids[rank][:n], experts, world)
        factor = sum((owners == r).any(-1).float() * (r + 1) for r in range(world))
        torch.testing.assert_close(out.float(), tokens[rank][:n].float() * factor.unsqueeze(-1), rtol=2e-2, atol=2e-2)
    comm.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_calls_of_engines(ranks, size):
    ranks(size).run(engine_calls)


def test_calls_of_engines_in_threads():
    with warnings.catch_warnings():
        call_on_ranks(2, engine_calls)


def test_indices_of_gathered_tables():
    """Two ranks with 2 and 3 tokens of two targets each; rank 1 looks."""
    targets = torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0], [0, 1]], dtype=INT)
    sums = torch.tensor([2, 5], dtype=INT)
    found = moe_comm_prepare_indices(targets, sums, 3, 4, 2, 1, 2)
    gather, send_sums, send, recv_sums, recv, backward = found
    assert all(one.dtype == INT for one in found) and [len(one) for one in found] == [6, 2, 6, 2, 6, 6]
    assert recv_sums.tolist() == [2, 4] and gather[:4].tolist() == [0, 1, 3, 4] and recv[:4].tolist() == [0, 1, 2, 3]
    assert send_sums.tolist() == [3, 5] and send[:5].tolist() == [0, 1, 2, 1, 2]
    assert backward[:5].tolist() == [0, 3, 4, 2, 5]
    ids, scales = torch.arange(10, dtype=INT).view(5, 2), torch.rand(5, 2)
    local_ids, local_scales = torch.empty(6, 2, dtype=INT), torch.empty(6, 2)
    moe_local_gather(recv_sums, gather, ids, scales, local_ids, local_scales, 3, 99, 2, 1, 2)
    assert local_ids.tolist() == [[0, 1], [2, 3], [6, 7], [8, 9], [99, 99], [99, 99]]
    assert torch.equal(local_scales[:4], scales[[0, 1, 3, 4]]) and (local_scales[4:] == 0).all()
    info, engine_ids, _ = MnnvlMoe.mnnvl_moe_alltoallv_prepare(targets, sums, ids, scales, 3, 99, 2, 1, 2)
    assert torch.equal(engine_ids, local_ids) and torch.equal(info.send_rank_local_indices, send)
    assert MnnvlMoe.compute_target_rank_id(torch.tensor([0, 3, 4, 7]), 8, 2).tolist() == [0, 0, 1, 1]
    whole = moe_comm_prepare_indices(targets[:4], None, 2, 4, 2, 0, 2)
    assert whole[3].tolist() == [1, 3] and whole[0][:3].tolist() == [0, 2, 3]


def test_sizes():
    assert trtllm_alltoall.get_moe_comm_module("cpu").moe_comm_workspace_bytes(
        4
    ) == 8 * get_moe_commworkspace_size_per_rank(4)
    with pytest.raises(ValueError, match="ep_size must be from 1 to 64, got 65"):
        get_moe_commworkspace_size_per_rank(65)
    with pytest.raises(ValueError, match="max_sm_count must be at least 2, got 1"):
        set_moe_max_usable_sm_count(1)


COUNT, PLACES = torch.tensor([2], dtype=INT), torch.tensor([0, 1], dtype=INT)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"all_workspaces": torch.zeros(1, 8, dtype=torch.int64)}, "all_workspaces must be uint64 of ep_size = 1 rows"),
        ({"all_workspaces": torch.zeros(1, 8, dtype=torch.uint64)}, "all_workspaces must have at least 525440 bytes"),
        ({"ep_rank": 1}, r"ep_rank must be in \[0, 1\), got 1"),
        ({"input": torch.zeros(3, 3)}, "output must have shape|output.shape"),
        (
            {"input": torch.zeros(3, 3), "output": torch.zeros(3, 3)},
            "rows of a positive multiple of 16 bytes, .*got 12",
        ),
        ({"send_indices": torch.tensor([0, 3], dtype=INT)}, r"send_indices must be in \[0, 3\), got 3"),
        ({"recv_indices": torch.tensor([0, -1], dtype=INT)}, r"recv_indices must be in \[0, 3\), got -1"),
        ({"send_rank_cum_sum": torch.tensor([3], dtype=INT)}, "send_rank_cum_sum must ascend from 0 to at most 2"),
        ({"recv_indices": PLACES.long()}, "recv_indices must be int32, got int64"),
    ],
)
def test_wrong_calls(change, text):
    space = torch.zeros(1, get_moe_commworkspace_size_per_rank(1), dtype=torch.uint64)
    given = {
        "input": torch.zeros(3, 4),
        "output": torch.zeros(3, 4),
        "all_workspaces": space,
        "ep_rank": 0,
        "ep_size": 1,
    }
    given |= {"send_rank_cum_sum": COUNT, "recv_rank_cum_sum": COUNT, "send_indices": PLACES, "recv_indices": PLACES}
    with pytest.raises(ValueError, match=text):
        moe_comm(**{**given, **change})
