# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.mla``: a key is read once for all heads, so decoding is bound by memory and, from 64 heads
on, by the tensor cores as well.

python benchmarks/bench_mla.py [--device cpu] [--json FILE]

The baseline is torch's attention on keys that were gathered from the pages beforehand.
"""

from __future__ import annotations

import math

import torch
from attention_inputs import torch_attention, workspace
from harness import Bench, bf16, case, fp16, grid, main, nbytes, rand

import flashinfer
from flashinfer.trace.templates.mla import mla_paged_reference

CUDA = grid(batch_size=[1, 16, 64, 256], s_kv=[1024, 8192], num_heads=[128], q_len=[1], dtype=[bf16])
CUDA += grid(batch_size=[64], s_kv=[4096], num_heads=[16, 64], q_len=[1, 4], dtype=[fp16])
CPU = grid(batch_size=[1, 8], s_kv=[1024], num_heads=[16], q_len=[1], dtype=[bf16])


@case("BatchMLAPagedAttentionWrapper", cpu=CPU, cuda=CUDA)
def mla(
    batch_size: int,
    s_kv: int,
    num_heads: int,
    q_len: int,
    dtype: torch.dtype,
    page_size: int = 64,
    head_dim_ckv: int = 512,  # head_dim_ckv and head_dim_kpe of DeepSeek
    head_dim_kpe: int = 64,
) -> Bench:
    each = -(-s_kv // page_size)
    indices = torch.randperm(each * batch_size).int()
    kv_indptr, qo_indptr = (torch.arange(batch_size + 1).int() * n for n in (each, q_len))
    lengths = torch.full((batch_size,), s_kv).int()
    q_nope, q_pe = (rand(batch_size * q_len, num_heads, n, dtype) for n in (head_dim_ckv, head_dim_kpe))
    ckv, kpe = (rand(each * batch_size, page_size, n, dtype) for n in (head_dim_ckv, head_dim_kpe))
    tables, scale = (qo_indptr, kv_indptr, indices, lengths), 1 / math.sqrt(128 + head_dim_kpe)
    buffers = [x.clone() for x in tables]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(), q_nope.is_cuda, *buffers)
    wrapper.plan(*tables, num_heads, head_dim_ckv, head_dim_kpe, page_size, True, scale, dtype, dtype)
    gathered = [x[indices.long()].view(batch_size, 1, -1, x.shape[-1])[:, :, :s_kv] for x in (ckv, kpe)]
    k = torch.cat(gathered, dim=-1)

    def baseline(q_nope: torch.Tensor, q_pe: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        q = torch.cat([q_nope, q_pe], dim=-1) * (scale * math.sqrt(head_dim_ckv + head_dim_kpe))
        return torch_attention(q, k, gathered[0], causal=q_len > 1)

    return Bench(
        run={"fa2": wrapper.run},
        args=(q_nope, q_pe, ckv, kpe),
        baseline=baseline,
        reference=lambda *args: mla_paged_reference(*args, *tables, True, scale),
        bytes=nbytes(q_nope, q_pe, q_nope, k),
        flops=2 * batch_size * q_len * num_heads * s_kv * (2 * head_dim_ckv + head_dim_kpe),
        flops_dtype=dtype,
    )


if __name__ == "__main__":
    main()
