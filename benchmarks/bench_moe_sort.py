# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the order of tokens by expert: bound by latency, so the figure to read is the time.

python benchmarks/bench_moe_sort.py [--device cpu] [--json FILE]
"""

from __future__ import annotations

import torch
from harness import Bench, case, grid, main, nbytes

from flashinfer.fused_moe import moe_sort
from flashinfer.fused_moe.utils import make_random_topk_ids
from flashinfer.trace.templates.fused_moe_sort import moe_sort_trace

# Mixtral, Qwen3, DeepSeek V3; decode, and a chunk of prefill.
CUDA = grid(num_tokens=[1, 64, 512, 8192], experts_top_k=[(8, 2), (128, 8), (256, 8)])
CPU = grid(num_tokens=[64, 1024], experts_top_k=[(128, 8)])


def _torch_sort(ids: torch.Tensor) -> torch.Tensor:
    """Order the pairs only: no offsets, no tiles."""
    return ids.flatten().sort(stable=True).indices


@case("moe_sort", cpu=CPU, cuda=CUDA)
def sort(num_tokens: int, experts_top_k: tuple[int, int]) -> Bench:
    experts, top_k = experts_top_k
    ids = make_random_topk_ids(experts, num_tokens, top_k, torch.get_default_device())
    return Bench(
        run=lambda ids: moe_sort(ids, None, experts, top_k, tile_tokens_dim=64),
        args=(ids,),
        baseline=_torch_sort,
        reference=lambda ids: moe_sort_trace.reference(ids, experts, tile_tokens_dim=64),
        bytes=3 * nbytes(ids),
    )


if __name__ == "__main__":
    main()
