# SPDX-License-Identifier: Apache-2.0
"""The fused all-reduce on one GPU: ranks as streams of one process, and as processes that take turns."""

from __future__ import annotations

import os
import random

import pytest
import torch

from flashinfer.comm import CommTimeoutError, allreduce_fusion
from flashinfer.comm.local_ranks import call_on_ranks
from flashinfer.comm.memory.cuda import tensor_at
from flashinfer.comm.memory.peers import create_peer_memory

from .calls import FP8, call, check, digest, expected, inputs, make_workspace, outputs
from .foreign import EngineBackend
from .patterns import more_patterns

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PATTERNS = (0, 1, 2, 4, 10, 11)


class Streams:
    """Workspaces of ranks that are streams; nothing is allocated while a rank waits for another one."""

    def __init__(self, size: int, tokens: int, hidden: int, dtype: torch.dtype) -> None:
        self.size = size
        self.spaces = call_on_ranks(size, lambda comm: make_workspace(comm, tokens, hidden, dtype, "cuda"))
        self.streams = [torch.cuda.Stream() for _ in range(size)]

    def each(self, launch):
        torch.cuda.synchronize()
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                launch(rank, self.spaces[rank])
        torch.cuda.synchronize()

    def close(self):
        for space in self.spaces:
            space.check()
            space.destroy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_streams(size, dtype):
    ranks = Streams(size, 64, 7168, dtype)
    shapes = [(1, 8), (64, 7168), (3, 40), (17, 2880), (0, 16), (33, 1024)]
    for seed, (pattern, shape) in enumerate((p, s) for p in PATTERNS for s in shapes):
        options = {"weight_bias": float(seed % 2), "launch_with_pdl": bool(seed % 2)}
        options["trigger_completion_at_end"] = seed % 3 == 0
        scale = {}
        if pattern in FP8:
            scale = {"scale_factor": torch.tensor([0.25], device="cuda")}
        given = [inputs(rank, *shape, dtype, "cuda", seed) for rank in range(size)]
        made = [outputs(pattern, x) for x, _, _ in given]

        def launch(rank, space, pattern=pattern, given=given, made=made, options=options, scale=scale):
            x, residual, gamma = given[rank]
            fused = {"residual_in": residual, "rms_gamma": gamma, **scale} if pattern else {}
            allreduce_fusion(x, space, pattern, **made[rank], **fused, **options)

        ranks.each(launch)
        want = expected(size, pattern, shape, dtype, seed, weight_bias=options["weight_bias"], scale_factor=0.25)
        for found in made:
            check(found, want, dtype)
        assert len({digest(found) for found in made}) == 1
    ranks.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_two_steps(size, dtype):
    """Check calls in one step and in two, on one workspace, with rows of zeros and sums that round to -0.0."""
    ranks = Streams(size, 64, 2880, dtype)
    x = torch.zeros(16, 64, dtype=dtype, device="cuda")
    out = [torch.empty_like(x) for _ in range(size)]
    ranks.each(lambda rank, space: allreduce_fusion(x, space, 0, output=out[rank], use_oneshot=False))  # loads it
    shapes = [(64, 2880), (9, 64), (1, 2880), (33, 1024), (10, 8), (64, 2880)]
    for seed, shape in enumerate(shapes):
        for pattern in (0, 1, 11):
            given = [inputs(rank, *shape, dtype, "cuda", seed) for rank in range(size)]
            if seed == 1:
                given = [(x * 0 - 1e-44 if pattern == 0 else x * 0, *more) for x, *more in given]
            made = [outputs(pattern, x) for x, _, _ in given]

            def launch(rank, space, pattern=pattern, given=given, made=made, steps=shape[0] > size):
                x, residual, gamma = given[rank]
                fused = {"residual_in": residual, "rms_gamma": gamma} if pattern else {}
                allreduce_fusion(x, space, pattern, **made[rank], **fused, use_oneshot=not steps)

            ranks.each(launch)
            assert len({digest(found) for found in made}) == 1
            if seed != 1:
                for found in made:
                    check(found, expected(size, pattern, shape, dtype, seed), dtype)
    ranks.close()


@pytest.mark.parametrize("size", [2, 4])
def test_sums_over_experts_and_packed_scales(size):
    def work(comm):
        with torch.cuda.stream(torch.cuda.Stream()):
            return more_patterns(comm, "cuda")

    call_on_ranks(1, work)  # loads all kernels: while one waits for a rank that has not launched, none can be loaded
    digests = call_on_ranks(size, work)
    assert all(one == digests[0] for one in digests)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_rank(pattern):
    """Check a rank alone: tools that run one kernel at a time can look at it."""
    ranks, shape, dtype = Streams(1, 5, 264, torch.bfloat16), (5, 264), torch.bfloat16
    for seed in range(4):
        found = call(ranks.spaces[0], pattern, inputs(0, *shape, dtype, "cuda", seed))
        check(found, expected(1, pattern, shape, dtype, seed), dtype)
    ranks.close()


def test_graphs_with_changing_numbers_of_tokens():
    """Replay graphs of three sizes in random order: what a call resets is what the call before it used."""
    size, dtype, hidden = 4, torch.bfloat16, 1024
    ranks = Streams(size, 64, hidden, dtype)
    counts = (1, 5, 64)
    x = [{n: torch.zeros(n, hidden, dtype=dtype, device="cuda") for n in counts} for _ in range(size)]
    out = [{n: torch.zeros(n, hidden, dtype=dtype, device="cuda") for n in counts} for _ in range(size)]
    ranks.each(lambda rank, space: allreduce_fusion(x[rank][1], space, 0, output=out[rank][1]))  # loads the kernel
    graphs = [{} for _ in range(size)]
    for rank in range(size):
        for n in counts:
            graphs[rank][n] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[rank][n], stream=ranks.streams[rank]):
                allreduce_fusion(x[rank][n], ranks.spaces[rank], 0, output=out[rank][n])
    order = random.Random(3)
    for i in range(1000):
        n = order.choice(counts)
        for rank in range(size):
            x[rank][n].fill_((i + 3 * rank) % 17 - 8)
        ranks.each(lambda rank, _, n=n: graphs[rank][n].replay())
        if i % 10 == 0 or i < 20:
            want = float(sum((i + 3 * rank) % 17 - 8 for rank in range(size)))
            for rank in range(size):
                assert out[rank][n].unique().tolist() == [want]
    ranks.close()


def test_special_values():
    ranks = Streams(2, 1, 16, torch.float32)
    row = [-0.0, 0.0, float("inf"), float("nan"), -1.0, 3e38, 1e-45, -1e-45] * 2
    x = [torch.tensor([row], device="cuda") for _ in range(2)]
    out = [torch.empty_like(one) for one in x]
    ranks.each(lambda rank, space: allreduce_fusion(x[rank], space, 0, output=out[rank]))
    wanted = torch.tensor([0.0, 0.0, float("inf"), float("nan"), -2.0, float("inf"), 2.8e-45, -2.8e-45] * 2)
    for found in out:
        torch.testing.assert_close(found[0].cpu(), wanted, rtol=0, atol=0, equal_nan=True)
        assert found[0].view(torch.int32)[0].item() == 0
    ranks.close()


def test_a_rank_that_does_not_come(monkeypatch):
    monkeypatch.setenv("FLASHINFER_COMM_TIMEOUT_S", "0.3")
    ranks = Streams(2, 4, 64, torch.bfloat16)
    x = torch.ones(4, 64, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(x)
    allreduce_fusion(x, ranks.spaces[0], 0, output=out)
    torch.cuda.synchronize()
    with pytest.raises(CommTimeoutError, match=r"rank 1 must push its rows within 0\.3 s, rank 0 got no data"):
        allreduce_fusion(x, ranks.spaces[0], 0, output=out)
    for space in ranks.spaces:
        space.destroy()


def share(comm, provider):
    torch.cuda.set_device(0)
    rank, size, nbytes = comm.Get_rank(), comm.Get_size(), 1 << 20
    files = len(os.listdir("/proc/self/fd"))
    seen = []
    for _ in range(3):
        memory = create_peer_memory(
            EngineBackend(comm), nbytes, "cuda:0", provider=provider, initialise=lambda own: own.fill_(7)
        )
        for peer, ptr in enumerate(memory.ptrs):
            tensor_at(ptr, nbytes, torch.device("cuda:0"))[rank] = 10 * peer + rank
        torch.cuda.synchronize()
        comm.barrier()
        seen.append(memory.own[: size + 1].tolist())
        comm.barrier()
        memory.close()
        if not seen[1:]:
            files = len(os.listdir("/proc/self/fd"))  # the first call opens files of the driver
    assert len(os.listdir("/proc/self/fd")) == files
    return seen


@pytest.mark.parametrize("provider", ["vmm", "ipc"])
@pytest.mark.parametrize("size", [2, 4])
def test_processes_share_memory(ranks, size, provider):
    assert ranks(size).run(share, provider) == [[[10 * own + p for p in range(size)] + [7]] * 3 for own in range(size)]


def run_on_gpu(comm, dtype):
    torch.cuda.set_device(0)
    rank, world, digests = comm.Get_rank(), comm.Get_size(), []
    workspace = make_workspace(EngineBackend(comm), 32, 2880, dtype, "cuda")
    for seed, (pattern, tokens, hidden) in enumerate([(0, 1, 64), (1, 32, 2880), (4, 3, 64), (11, 7, 1024), (1, 1, 8)]):
        made = call(workspace, pattern, inputs(rank, tokens, hidden, dtype, "cuda", seed))
        torch.cuda.synchronize()
        workspace.check()
        check(made, expected(world, pattern, (tokens, hidden), dtype, seed), dtype)
        digests.append(digest(made))
    comm.barrier()
    provider = workspace._memory.provider
    workspace.destroy()
    return provider, digests


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_processes(ranks, size, dtype):
    outcomes = ranks(size).run(run_on_gpu, dtype)
    assert all(outcome == outcomes[0] for outcome in outcomes) and outcomes[0][0] == "vmm"
