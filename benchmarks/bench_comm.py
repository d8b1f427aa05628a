# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.comm``: all ranks on one device, as streams or threads of one process.

The ranks share the memory and the SMs of one GPU, and no link: the figures bound the protocol, not NVLink.

python benchmarks/bench_comm.py [--device cpu] [--json FILE]
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from harness import Bench, bf16, case, grid, main, nbytes, rand

from flashinfer.comm import (
    allreduce_fusion,
    create_allreduce_fusion_workspace,
    moe_a2a_combine,
    moe_a2a_dispatch,
    moe_a2a_get_workspace_size_per_rank,
    moe_a2a_initialize,
)
from flashinfer.comm.local_ranks import LocalComm, call_on_ranks
from flashinfer.trace.templates.comm import allreduce_fusion_trace

# Rows of a decode step and of the largest message that engines send at once (512 KiB); hidden width of DeepSeek V3.
CUDA = grid(ranks=[2, 4, 8], pattern=[0, 1], num_tokens=[1, 36], hidden_size=[7168])
CPU = grid(ranks=[2], pattern=[0, 1], num_tokens=[16], hidden_size=[4096])


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

    threads = ThreadPoolExecutor(ranks)
    streams = [torch.cuda.Stream() for _ in range(ranks)] if x.is_cuda else []

    def run(*args: torch.Tensor) -> torch.Tensor:
        if not streams:
            list(threads.map(lambda rank: call(rank, *args), range(ranks)))
        else:
            main_stream = torch.cuda.current_stream()
            for rank, stream in enumerate(streams):
                stream.wait_stream(main_stream)
                with torch.cuda.stream(stream):
                    call(rank, *args)
            for stream in streams:
                main_stream.wait_stream(stream)
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
    threads = ThreadPoolExecutor(ranks)
    streams = [torch.cuda.Stream() for _ in range(ranks)] if x.is_cuda else []

    def run(x: torch.Tensor) -> torch.Tensor:
        if not streams:
            list(threads.map(lambda rank: given.call(rank, x[rank]), range(ranks)))
            return given.outs
        main_stream = torch.cuda.current_stream()
        for rank, stream in enumerate(streams):
            stream.wait_stream(main_stream)
            with torch.cuda.stream(stream):
                given.call(rank, x[rank])
        for stream in streams:
            main_stream.wait_stream(stream)
        return given.outs

    def reference(x: torch.Tensor) -> torch.Tensor:
        owners = given.ids // (experts // ranks)
        count = sum((owners == rank).any(-1).to(x.dtype) for rank in range(ranks))
        return x * count.unsqueeze(-1)

    return Bench(run=run, args=(x,), reference=reference, bytes=2 * nbytes(x) * min(ranks, top_k))


if __name__ == "__main__":
    main()
