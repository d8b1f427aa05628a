# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of routing: bound by latency, so the figure to read is the time.

python benchmarks/bench_moe_routing.py [-k hash_topk] [--device cpu] [--json FILE]
"""

from __future__ import annotations

import torch
from harness import Bench, case, fp32, grid, main, nbytes, rand

from flashinfer.fused_moe import fused_topk_deepseek, hash_topk, route_tokens
from flashinfer.tllm_enums import RoutingMethodType
from flashinfer.trace.templates import fused_moe_routing as templates

CUDA = grid(num_tokens=[1, 256, 8192])
CPU = grid(num_tokens=[64])


@case("fused_topk_deepseek", cpu=CPU, cuda=CUDA)
def deepseek(num_tokens: int) -> Bench:
    """DeepSeek V3."""
    scores, bias = rand(num_tokens, 256, fp32), rand(256, fp32)
    weights, experts = torch.empty(num_tokens, 8), torch.empty(num_tokens, 8, dtype=torch.int32)

    def run(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fused_topk_deepseek(args[0], args[1], 8, 4, 8, 2.5, args[2], args[3])
        return args[2:]

    def reference(scores: torch.Tensor, bias: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return templates.fused_topk_deepseek_trace.reference(scores, bias, 8, 4, 8, 2.5)

    args = (scores, bias, weights, experts)
    return Bench(run=run, args=args, baseline=reference, reference=reference, bytes=nbytes(scores))


@case("route_tokens", cpu=CPU, cuda=CUDA)
def renormalize(num_tokens: int) -> Bench:
    """Qwen3-30B-A3B."""

    def baseline(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, experts = logits.topk(8, dim=1)
        return values.softmax(dim=1), experts.int()

    logits = rand(num_tokens, 128, fp32)
    return Bench(
        run=lambda logits: route_tokens(logits, 8, RoutingMethodType.Renormalize),
        args=(logits,),
        baseline=baseline,
        reference=lambda logits: templates.route_tokens_trace.reference(logits, 8, 1),
        bytes=nbytes(logits),
    )


@case("hash_topk", cpu=CPU, cuda=CUDA)
def table(num_tokens: int) -> Bench:
    ids = torch.randint(0, 1000, (num_tokens,))
    args = (rand(num_tokens, 256, fp32), ids, torch.randint(0, 256, (1000, 6), dtype=torch.int32))
    reference = templates.hash_topk_trace.reference
    return Bench(run=hash_topk, args=args, baseline=reference, reference=reference, bytes=num_tokens * 6 * 16)


if __name__ == "__main__":
    main()
