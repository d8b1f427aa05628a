# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of experts against a batched product of gathered matrices.

python benchmarks/bench_bgmv_moe.py [--device cpu] [--json FILE]
"""

from __future__ import annotations

import torch
from harness import Bench, bf16, case, grid, main, rand

from flashinfer.fused_moe import bgmv_moe
from flashinfer.trace.templates.bgmv_moe import bgmv_moe_trace

# gate of Qwen3-30B with 4 adapters; decode, and a chunk of prefill.
CUDA = grid(num_tokens=[1, 64, 512], rank=[16, 64], top_k=[8])
CPU = grid(num_tokens=[4], rank=[16], top_k=[8])
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


if __name__ == "__main__":
    main()
