# SPDX-License-Identifier: Apache-2.0
"""The one-sided exchange of tokens on one GPU: ranks as streams of one process, and as processes that take turns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flashinfer.comm import CommTimeoutError, moe_a2a_combine, moe_a2a_dispatch, moe_a2a_initialize
from flashinfer.comm import moe_a2a_get_workspace_size_per_rank as size_of
from flashinfer.comm.local_ranks import local_comms
from flashinfer.comm.memory.waiting import waiting_for

from ..moe_ep.exchanged_layer import layer
from .exchanges import (
    CASES,
    EXPERTS,
    HIDDEN,
    MOST,
    TOP_K,
    check_combined,
    check_received,
    exchange,
    make_exchange,
    partial_attention,
    results_of,
    run_cases,
    tokens_of,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_streams(world, work):
    """Call ``work(comm)`` for every rank in a thread with a stream of its own; first for one rank alone.

    That loads all kernels: loading one waits for the kernels that run, which wait for ranks that have not launched.
    """
    if world > 1:
        on_streams(1, work)

    def run(comm):
        with torch.cuda.stream(torch.cuda.Stream()):
            result = work(comm)
            torch.cuda.current_stream().synchronize()
            return result

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(run, local_comms(world)))


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_streams(world):
    on_streams(world, lambda comm: run_cases(comm, "cuda"))


@pytest.mark.parametrize("backend", ["nvlink_one_sided", "nvlink_two_sided"])
def test_layer(backend):
    on_streams(4, lambda comm: layer(comm, backend, "cuda"))


def test_wide_rows_and_many_tokens():
    """Check rows of DeepSeek V3, more tokens than a group of 32 in each block, and slots in order of token."""
    experts, top_k, hidden, most = 256, 8, 7168, 300

    def work(comm):
        world, rank = comm.Get_size(), comm.Get_rank()
        alltoall = make_exchange(comm, most, top_k, experts, hidden, "cuda")
        waiting_for(alltoall.workspace, rank).max_blocks = 4  # 75 tokens a block: three groups
        counts = [300, 1, 77, 0][:world]
        sent = [tokens_of(r, counts[r], experts, top_k, hidden, "random", "cuda") for r in range(world)]
        for _ in range(3):
            views, found = exchange(alltoall, sent[rank], most, True)
            torch.cuda.current_stream().synchronize()
            check_received(rank, sent, views, experts, most)
            check_combined(sent[rank], found, experts, world, 2e-2)
        comm.barrier()
        alltoall.destroy()

    on_streams(4, work)


def test_graphs():
    """Capture dispatch and combine of every rank, and replay them with other tokens."""
    on_streams(1, lambda comm: run_cases(comm, "cuda"))
    world, rows, hidden, experts, top_k = 4, 8, 64, 8, 2
    table = torch.zeros(
        world, size_of(world, rows, 2 * hidden + 8 * top_k, 2 * hidden), dtype=torch.uint8, device="cuda"
    )
    metas = [moe_a2a_initialize(table, rank, world, rows) for rank in range(world)]
    x = [torch.zeros(5, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(world)]
    ids = [torch.zeros(5, top_k, dtype=torch.int32, device="cuda") for _ in range(world)]
    outs = [torch.zeros_like(one) for one in x]
    streams = [torch.cuda.Stream() for _ in range(world)]

    def call(rank):
        sizes = (rows, rank, world, top_k)
        (got,), offset, _ = moe_a2a_dispatch(ids[rank], [x[rank]], table, metas[rank], *sizes, experts)
        results = results_of(rank, got)
        moe_a2a_combine(results, 5, table, metas[rank], *sizes, offset, output=outs[rank])

    def each(work):
        torch.cuda.synchronize()
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                work(rank)
        torch.cuda.synchronize()

    each(call)
    graphs = []
    for rank, stream in enumerate(streams):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            call(rank)
    for repeat in range(50):
        g = torch.Generator().manual_seed(repeat)
        for rank in range(world):
            x[rank].copy_(torch.randn(5, hidden, generator=g))
            ids[rank].copy_(torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(5)]))
        each(lambda rank: graphs[rank].replay())
        for rank in range(world):
            owners = ids[rank] // 2
            factor = sum((owners == r).any(-1) * (r + 1) for r in range(world))
            torch.testing.assert_close(outs[rank].float(), x[rank].float() * factor.unsqueeze(-1), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("world", [2, 4])
def test_partial_attention(world):
    on_streams(world, lambda comm: partial_attention(comm, "cuda"))


@pytest.mark.parametrize("absent", [True, False])
def test_ranks_that_do_not_come_or_differ(monkeypatch, absent):
    monkeypatch.setenv("FLASHINFER_COMM_TIMEOUT_S", "0.3")
    table = torch.zeros(2, size_of(2, 8, 4096, 4096), dtype=torch.uint8, device="cuda")
    metas = [moe_a2a_initialize(table, rank, 2, 8) for rank in range(2)]
    ids, x = torch.zeros(3, 2, dtype=torch.int32, device="cuda"), torch.randn(3, 16, device="cuda")
    for rank in range(1 if absent else 2):
        with torch.cuda.stream(torch.cuda.Stream()):
            moe_a2a_dispatch(ids, [x], table, metas[rank], 4 + rank, rank, 2, 2, 4)
    torch.cuda.synchronize()
    kind, text = (CommTimeoutError, "rank 1 must send its tokens") if absent else (ValueError, "equal on all ranks")
    with pytest.raises(kind, match=text):
        moe_a2a_dispatch(ids, [x], table, metas[0], 4, 0, 2, 2, 4)


def run_on_gpu(comm):
    torch.cuda.set_device(0)
    alltoall = make_exchange(comm, MOST, TOP_K, EXPERTS, HIDDEN, "cuda")
    assert alltoall.mnnvl_mem.memory.provider == "vmm" and alltoall.mnnvl_mem.rank_stride == 1 << 29
    rank, world = comm.Get_rank(), comm.Get_size()
    counts, kind, in_place = CASES[0]
    sent = [tokens_of(r, counts[r], EXPERTS, TOP_K, HIDDEN, kind, "cuda") for r in range(world)]
    for _ in range(2):
        views, found = exchange(alltoall, sent[rank], MOST, in_place)
        torch.cuda.synchronize()
        check_received(rank, sent, views, EXPERTS, MOST)
        check_combined(sent[rank], found, EXPERTS, world)
    comm.barrier()
    alltoall.destroy()


def test_processes(ranks):
    ranks(2).run(run_on_gpu)
