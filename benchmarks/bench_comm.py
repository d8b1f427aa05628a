# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.comm``: all ranks on one device, as streams or threads of one process.

The ranks share the memory and the SMs of one GPU, and no link: the figures bound the protocol, not NVLink.

python benchmarks/bench_comm.py [--device cpu] [--json FILE]
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Callable

import torch
from harness import Bench, bf16, case, grid, main, nbytes, rand

from flashinfer.comm import (
    allreduce_fusion,
    create_allreduce_fusion_workspace,
    moe_a2a_combine,
    moe_a2a_dispatch,
    moe_a2a_get_workspace_size_per_rank,
    moe_a2a_initialize,
    vllm_all_reduce,
    vllm_init_custom_ar,
    vllm_meta_size,
    vllm_register_buffer,
)
from flashinfer.comm.local_ranks import LocalComm, call_on_ranks
from flashinfer.comm.trtllm_alltoall import get_moe_commworkspace_size_per_rank, moe_comm
from flashinfer.trace.templates.comm import allreduce_fusion_trace, vllm_all_reduce_trace

# Rows of a decode step and of the largest message that engines send at once (512 KiB); hidden width of DeepSeek V3.
CUDA = grid(ranks=[2, 4, 8], pattern=[0, 1], num_tokens=[1, 36], hidden_size=[7168])
CPU = grid(ranks=[2], pattern=[0, 1], num_tokens=[16], hidden_size=[4096])


class AllRanks:
    """Calls of all ranks of a device: on a stream each, or in a thread each."""

    def __init__(self, ranks: int, is_cuda: bool) -> None:
        self.threads = ThreadPoolExecutor(ranks)
        self.streams = [torch.cuda.Stream() for _ in range(ranks)] if is_cuda else []
        self.ranks = ranks
        self.memory: tuple[torch.Tensor, ...] = ()

    def run(self, call: Callable[[int], None]) -> None:
        if not self.streams:
            list(self.threads.map(call, range(self.ranks)))
            return
        main_stream = torch.cuda.current_stream()
        for rank, stream in enumerate(self.streams):
            stream.wait_stream(main_stream)
            with torch.cuda.stream(stream):
                call(rank)
        for stream in self.streams:
            main_stream.wait_stream(stream)


@case("allreduce_fusion", cpu=CPU, cuda=CUDA)
def all_reduce(ranks: int, pattern: int, num_tokens: int, hidden_size: int) -> Bench:
    x = rand(ranks, num_tokens, hidden_size, bf16)
    residual, gamma = rand(num_tokens, hidden_size, bf16), rand(hidden_size, bf16)
    device = str(x.device)

    def make(comm: LocalComm):
        size = (comm.Get_size(), comm.Get_rank(), num_tokens, hidden_size)
        return create_allreduce_fusion_workspace("trtllm", *size, bf16, comm_backend=comm, device=device)

    spaces = call_on_ranks(ranks, make)
    outs, norms = torch.empty_like(x), torch.empty_like(x)

    def call(rank: int, x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor) -> None:
        fused = {"residual_in": residual, "residual_out": outs[rank], "norm_out": norms[rank], "rms_gamma": gamma}
        chosen = fused if pattern else {"output": outs[rank]}
        allreduce_fusion(x[rank], spaces[rank], pattern, **chosen)

    group = AllRanks(ranks, x.is_cuda)

    def run(*args: torch.Tensor) -> torch.Tensor:
        group.run(lambda rank: call(rank, *args))
        return norms[0] if pattern else outs[0]

    def reference(*args: torch.Tensor) -> torch.Tensor:
        return allreduce_fusion_trace.reference(args[0], pattern, *args[1:])[2 if pattern else 0]

    return Bench(run=run, args=(x, residual, gamma), reference=reference, bytes=nbytes(x, outs) * ranks)


class Exchange:
    """A table, and what each rank dispatches: every token has ``top_k`` experts, drawn evenly."""

    def __init__(self, ranks: int, x: torch.Tensor, experts: int, top_k: int) -> None:
        tokens, hidden = x.shape[-2:]
        size = moe_a2a_get_workspace_size_per_rank(ranks, tokens, 2 * hidden, 2 * hidden)
        self.table = torch.zeros(ranks, size, dtype=torch.uint8, device=x.device)
        self.metas = [moe_a2a_initialize(self.table, rank, ranks, tokens) for rank in range(ranks)]
        g = torch.Generator().manual_seed(0)
        drawn = [[torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)] for _ in range(ranks)]
        self.ids = torch.stack([torch.stack(one) for one in drawn]).to(x.device, torch.int32)
        self.outs = torch.empty(ranks, tokens, hidden, dtype=x.dtype, device=x.device)
        self.sizes, self.experts = (tokens, ranks, top_k), experts
        self.views: list[dict] = [{} for _ in range(ranks)]

    def call(self, rank: int, x: torch.Tensor) -> None:
        tokens, ranks, top_k = self.sizes
        where = (self.table, self.metas[rank], tokens, rank, ranks, top_k)
        (got,), offset, _ = moe_a2a_dispatch(
            self.ids[rank], [x], *where, self.experts, recv_view_cache=self.views[rank]
        )
        moe_a2a_combine(got, tokens, *where, offset, output=self.outs[rank])


@case(
    "moe_a2a",
    cpu=grid(ranks=[2], num_tokens=[16], hidden_size=[1024]),
    cuda=grid(ranks=[2, 8], num_tokens=[1, 16], hidden_size=[7168]),
)
def exchange(ranks: int, num_tokens: int, hidden_size: int) -> Bench:
    experts, top_k = 32, 4
    x = rand(ranks, num_tokens, hidden_size, bf16)
    Exchange(1, x[0], experts, top_k).call(0, x[0])  # loads the kernels: none can be loaded while one waits for a rank
    given = Exchange(ranks, x, experts, top_k)
    group = AllRanks(ranks, x.is_cuda)

    def run(x: torch.Tensor) -> torch.Tensor:
        group.run(lambda rank: given.call(rank, x[rank]))
        return given.outs

    def reference(x: torch.Tensor) -> torch.Tensor:
        owners = given.ids // (experts // ranks)
        count = sum((owners == rank).any(-1).to(x.dtype) for rank in range(ranks))
        return x * count.unsqueeze(-1)

    return Bench(run=run, args=(x,), reference=reference, bytes=2 * nbytes(x) * min(ranks, top_k))


@case("vllm_all_reduce", cpu=grid(ranks=[2], size=[1 << 16]), cuda=grid(ranks=[2, 8], size=[7168, 1 << 18]))
def reading_all_reduce(ranks: int, size: int) -> Bench:
    x, outs = rand(ranks, size, bf16), torch.empty(ranks, size, dtype=bf16)
    outs = outs.to(x.device)
    memory = torch.zeros(ranks, vllm_meta_size() + nbytes(x[0]), dtype=torch.uint8, device=x.device)
    tables, buffers = torch.zeros(ranks, 64, dtype=torch.uint8, device=x.device), torch.empty_like(x)
    heads, inputs = ([one.data_ptr() for one in each] for each in (memory, buffers))
    handles = [vllm_init_custom_ar(heads, tables[rank], rank, True) for rank in range(ranks)]
    for handle in handles:
        vllm_register_buffer(handle, inputs)
    group = AllRanks(ranks, x.is_cuda)
    group.memory = (memory, buffers)  # the addresses above do not keep it

    def run(x: torch.Tensor) -> torch.Tensor:
        size, ctas = nbytes(x[0]), max(36 // ranks, 1)
        group.run(lambda rank: vllm_all_reduce(handles[rank], x[rank], outs[rank], inputs[rank], size, ctas))
        return outs[0]

    return Bench(run=run, args=(x,), reference=vllm_all_reduce_trace.reference, bytes=nbytes(x) * (ranks + 1))


@case(
    "moe_comm",
    cpu=grid(ranks=[2], num_tokens=[16], hidden_size=[1024]),
    cuda=grid(ranks=[2, 8], num_tokens=[16, 128], hidden_size=[7168]),
)
def two_sided_exchange(ranks: int, num_tokens: int, hidden_size: int) -> Bench:
    x = rand(ranks, num_tokens, hidden_size, bf16)
    words = get_moe_commworkspace_size_per_rank(ranks)
    space = torch.zeros(ranks, words, dtype=torch.uint64, device=x.device)
    each = num_tokens // ranks  # rows to each rank
    sums = torch.arange(1, ranks + 1, dtype=torch.int32, device=x.device) * each
    order = torch.arange(num_tokens, dtype=torch.int32, device=x.device)
    outs = torch.zeros_like(x)
    group = AllRanks(ranks, x.is_cuda)

    def run(x: torch.Tensor) -> torch.Tensor:
        group.run(lambda rank: moe_comm(x[rank], sums, order, outs[rank], sums, order, space, rank, ranks))
        return outs

    def reference(x: torch.Tensor) -> torch.Tensor:
        sent = x[:, : each * ranks].unflatten(1, (ranks, each)).transpose(0, 1).flatten(1, 2)
        return torch.cat([sent, torch.zeros_like(x[:, each * ranks :])], 1)

    return Bench(run=run, args=(x,), reference=reference, bytes=2 * nbytes(x))


if __name__ == "__main__":
    main()
