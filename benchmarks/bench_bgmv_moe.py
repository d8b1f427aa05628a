# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of experts against a batched product of gathered matrices.

python benchmarks/bench_bgmv_moe.py [--device cpu] [--json FILE]
"""

from __future__ import annotations

import torch
from harness import Bench, bf16, case, grid, main, rand

from flashinfer.fused_moe import bgmv_moe, bgmv_moe_gemm1_lora_delta, bgmv_moe_gemm2_lora_delta, fill_w_ptr
from flashinfer.trace.templates.bgmv_moe import (
    bgmv_moe_gemm1_lora_delta_trace,
    bgmv_moe_gemm2_lora_delta_trace,
    bgmv_moe_trace,
)

# gate of Qwen3-30B with 4 adapters; decode, and a chunk of prefill.
CUDA = grid(num_tokens=[1, 64, 512], rank=[16, 64], top_k=[8])
CPU = grid(num_tokens=[4], rank=[16], top_k=[8])
# both products of its layers, decode; tables hold addresses, so a graph that rotates copies reads the same matrices
DELTAS = grid(num_tokens=[1, 16, 64], rank=[16, 64], top_k=[8])
EXPERTS, LORAS, HIDDEN, INNER = 128, 4, 2048, 768


@case("bgmv_moe", cpu=CPU, cuda=CUDA)
def adapters(num_tokens: int, rank: int, top_k: int) -> Bench:
    pairs = num_tokens * top_k
    x = rand(num_tokens, HIDDEN, bf16)
    a, b = rand(LORAS, EXPERTS, rank, HIDDEN, bf16), rand(LORAS, EXPERTS, INNER, rank, bf16)
    tokens, experts = torch.arange(num_tokens).repeat_interleave(top_k), torch.randint(0, EXPERTS, (pairs,))
    loras, weights = torch.randint(0, LORAS, (num_tokens,)), torch.rand(pairs)

    def run(x, a, b, tokens, experts, loras, weights):
        return bgmv_moe(x, [a], [b], tokens, experts, loras, weights, EXPERTS)

    def baseline(x, a, b, tokens, experts, loras, weights):
        low = torch.bmm(a[loras[tokens], experts], x[tokens].unsqueeze(2))
        up = torch.bmm(b[loras[tokens], experts], low).squeeze(2) * weights.unsqueeze(1).to(x.dtype)
        return torch.zeros(num_tokens, INNER, dtype=x.dtype, device=x.device).index_add_(0, tokens, up)

    return Bench(
        run=run,
        args=(x, a, b, tokens, experts, loras, weights),
        baseline=baseline,
        reference=bgmv_moe_trace.reference,
        bytes=pairs * rank * (HIDDEN + INNER) * 2,
    )


def tables(*banks: torch.Tensor) -> tuple[torch.Tensor, int]:
    w_ptr = torch.zeros(len(banks), EXPERTS, dtype=torch.int64)
    strides = {fill_w_ptr(w_ptr, bank, EXPERTS, i) for i, bank in enumerate(banks)}
    return w_ptr, strides.pop()


def both_products(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, loras: torch.Tensor, experts: torch.Tensor):
    """Return B A x of each pair, by batched products of gathered matrices."""
    low = torch.bmm(a[loras, experts], x.unsqueeze(2))
    return torch.bmm(b[loras, experts], low).squeeze(2)


@case("bgmv_moe_gemm1_lora_delta", cpu=CPU, cuda=DELTAS)
def of_first_product(num_tokens: int, rank: int, top_k: int) -> Bench:
    a = [rand(LORAS, EXPERTS, rank, HIDDEN, bf16) for _ in range(2)]
    b = [rand(LORAS, EXPERTS, INNER, rank, bf16) for _ in range(2)]
    (w_a, stride_a), (w_b, stride_b) = tables(*a), tables(*b)
    ids = torch.randint(0, EXPERTS, (num_tokens, top_k), dtype=torch.int32)
    loras = torch.randint(0, LORAS, (num_tokens,), dtype=torch.int32)

    def baseline(x, w_a, stride_a, w_b, stride_b, ids, loras, rank, inner):
        each = (x.repeat_interleave(top_k, 0), loras.long().repeat_interleave(top_k), ids.view(-1).long())
        halves = [both_products(each[0], a[i], b[i], *each[1:]) for i in range(2)]
        return torch.cat(halves, 1).view(num_tokens, top_k, -1)

    return Bench(
        run=bgmv_moe_gemm1_lora_delta,
        args=(rand(num_tokens, HIDDEN, bf16), w_a, stride_a, w_b, stride_b, ids, loras, rank, INNER),
        baseline=baseline,
        reference=bgmv_moe_gemm1_lora_delta_trace.reference,
        bytes=num_tokens * top_k * rank * (HIDDEN + INNER) * 4,
    )


@case("bgmv_moe_gemm2_lora_delta", cpu=CPU, cuda=DELTAS)
def of_second_product(num_tokens: int, rank: int, top_k: int) -> Bench:
    a, b = rand(LORAS, EXPERTS, rank, INNER, bf16), rand(LORAS, EXPERTS, HIDDEN, rank, bf16)
    (w_a, stride_a), (w_b, stride_b) = tables(a), tables(b)
    pairs = num_tokens * top_k
    ids = torch.randint(0, EXPERTS, (num_tokens, top_k), dtype=torch.int32)
    loras = torch.randint(0, LORAS, (num_tokens,), dtype=torch.int32)
    rows, weights = torch.randperm(pairs).int(), torch.rand(num_tokens, top_k)

    def baseline(x, rows, w_a, stride_a, w_b, stride_b, ids, weights, loras, rank, hidden):
        up = both_products(x[rows], a, b, loras.long().repeat_interleave(top_k), ids.view(-1).long())
        return (up.view(num_tokens, top_k, -1) * weights.unsqueeze(2).to(x.dtype)).sum(1)

    return Bench(
        run=bgmv_moe_gemm2_lora_delta,
        args=(rand(pairs, INNER, bf16), rows, w_a, stride_a, w_b, stride_b, ids, weights, loras, rank, HIDDEN),
        baseline=baseline,
        reference=bgmv_moe_gemm2_lora_delta_trace.reference,
        bytes=pairs * rank * (HIDDEN + INNER) * 2,
    )


if __name__ == "__main__":
    main()
