# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of decoding over tables of pages without a plan: what ``bench_decode.py`` measures, lengths on the device.

python benchmarks/bench_xqa.py [--device cpu] [--json FILE]
"""

from __future__ import annotations

import torch
from attention_inputs import PagedBatch, attention_bytes, attention_flops, torch_attention, workspace
from harness import Bench, bf16, case, fp32, grid, main, rand

from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.trace.templates.xqa import trtllm_batch_decode_dispatch

HEADS = {"num_qo_heads": [32], "num_kv_heads": [8], "head_dim": [128], "dtype": [bf16]}  # heads of an 8B model
CUDA = grid(batch_size=[1, 64, 256], s_kv=[1024, 8192], use_sinks=[False], **HEADS)
CUDA += grid(batch_size=[64], s_kv=[8192], use_sinks=[True], **HEADS)
CPU = grid(batch_size=[8], s_kv=[1024], use_sinks=[False], **HEADS)


@case("trtllm_batch_decode_with_kv_cache", cpu=CPU, cuda=CUDA)
def decode(
    batch_size: int,
    s_kv: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    use_sinks: bool = False,
    page_size: int = 16,
) -> Bench:
    batch = PagedBatch(batch_size, s_kv, num_kv_heads, head_dim, head_dim, page_size, dtype)
    q, scale = rand(batch_size, num_qo_heads, head_dim, dtype), head_dim**-0.5
    tables = batch.indices.view(batch_size, -1)
    lengths, scratch = torch.full((batch_size,), s_kv).int(), workspace()
    # Sinks of -inf do not change the result.
    sinks = torch.full((num_qo_heads,), -torch.inf).to(fp32) if use_sinks else None

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return trtllm_batch_decode_with_kv_cache(
            q, (k, v), scratch, tables, lengths, s_kv, scale, sinks=sinks, kv_layout="NHD"
        )

    reference = trtllm_batch_decode_dispatch(kv_layout="NHD", kv_cache=(q, q)).reference
    return Bench(
        run={"xqa": run},
        args=(q, batch.k_cache, batch.v_cache),
        baseline=lambda q, *_: torch_attention(q, batch.k, batch.v, causal=False),
        reference=lambda q, k, v: reference(q, (k, v), None, tables, lengths, 0, scale, heads_first=0),
        bytes=attention_bytes(q, batch.k, batch.v),
        flops=attention_flops(batch_size, 1, s_kv, head_dim, head_dim, num_qo_heads, False),
        flops_dtype=dtype,
    )


if __name__ == "__main__":
    main()
