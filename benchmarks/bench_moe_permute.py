# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of activations in expert order, and back: copies, so the figure to read is the fraction of peak.

python benchmarks/bench_moe_permute.py [-k moe_unpermute] [--device cpu] [--json FILE]
"""

from __future__ import annotations

import torch
from harness import Bench, bf16, case, grid, main, rand

from flashinfer.fused_moe import moe_permute, moe_unpermute
from flashinfer.trace.templates.fused_moe_permute import moe_permute_trace, moe_unpermute_trace

# Qwen3-30B, DeepSeek V3; decode, and a chunk of prefill.
CUDA = grid(num_tokens=[1, 64, 8192], hidden_size=[2048, 7168], top_k=[8])
CPU = grid(num_tokens=[64], hidden_size=[2048], top_k=[8])


@case("moe_permute", cpu=CPU, cuda=CUDA)
def permute(num_tokens: int, hidden_size: int, top_k: int) -> Bench:
    count = num_tokens * top_k
    x, out, rows = rand(num_tokens, hidden_size, bf16), rand(count, hidden_size, bf16), torch.randperm(count).int()

    def run(x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        moe_permute(x, out, None, rows, None, count, top_k, 1)
        return out

    return Bench(
        run=run,
        args=(x, out, rows),
        baseline=lambda x, out, rows: torch.index_select(x, 0, rows // top_k, out=out),
        reference=lambda x, out, rows: moe_permute_trace.reference(x, out, rows, count, top_k),
        bytes=(num_tokens + count) * hidden_size * 2,
    )


@case("moe_unpermute", cpu=CPU, cuda=CUDA)
def unpermute(num_tokens: int, hidden_size: int, top_k: int) -> Bench:
    count = num_tokens * top_k
    x, out = rand(count, hidden_size, bf16), rand(num_tokens, hidden_size, bf16)
    rows, scales = torch.randperm(count).int().view(num_tokens, top_k), torch.rand(num_tokens, top_k)

    def run(x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        moe_unpermute(x, out, rows, scales, num_tokens, top_k)
        return out

    def baseline(x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch.einsum("tkh,tk->th", x[rows.long()], scales.to(x.dtype))

    return Bench(
        run=run,
        args=(x, out, rows, scales),
        baseline=baseline,
        reference=moe_unpermute_trace.reference,
        bytes=(num_tokens + count) * hidden_size * 2,
    )


if __name__ == "__main__":
    main()
