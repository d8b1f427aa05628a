# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.prefill``: bound by the matrix units, so the figure to read is TFLOP/s.

python benchmarks/bench_prefill.py [-k Paged] [--device cpu] [--json FILE]

The baseline is torch's attention on keys and values that were gathered from the pages beforehand.
"""

from __future__ import annotations

from typing import Optional

import torch
from attention_inputs import (
    PagedBatch,
    attention_bytes,
    attention_flops,
    attention_flops_with_actual_seq_lens,
    lengths,
    offsets,
    query_bytes,
    torch_attention,
    workspace,
)
from harness import Bench, bf16, case, fp16, grid, main, nbytes, rand

import flashinfer
from flashinfer.trace.templates.prefill import paged_prefill_trace, ragged_prefill_trace, single_prefill_trace

HEADS = {"num_qo_heads": [32], "num_kv_heads": [8], "head_dim_qk": [128], "head_dim_vo": [128], "causal": [True]}
CUDA = [p | {"s_kv": p["s_qo"]} for p in grid(batch_size=[1, 8], s_qo=[1024, 8192], dtype=[bf16, fp16], **HEADS)]
CUDA += grid(batch_size=[16], s_qo=[128], s_kv=[8192], dtype=[bf16], **HEADS)  # a chunk of a long prompt
CPU = grid(batch_size=[1], s_qo=[1024], s_kv=[1024], dtype=[bf16, fp16], **HEADS)


def _query_lengths(s_qo: int, of_keys: torch.Tensor, is_random: bool) -> torch.Tensor:
    """Return the queries per request: ``s_qo``, or a random number up to ``s_qo`` and the request's number of keys."""
    drawn = lengths(len(of_keys), s_qo, is_random)
    return drawn.minimum(of_keys) if is_random else drawn


@case(
    "BatchPrefillWithPagedKVCacheWrapper",
    cpu=[p | {"page_size": 16} for p in CPU],
    cuda=[p | {"page_size": 16} for p in CUDA],
)
def paged_prefill(
    batch_size: int,
    s_qo: int,
    s_kv: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int,
    page_size: int,
    causal: bool,
    dtype: torch.dtype,
    kv_dtype: Optional[torch.dtype] = None,
    out_dtype: Optional[torch.dtype] = None,
    random_actual_seq_len: bool = False,
) -> Bench:
    kv_dtype, out_dtype = kv_dtype or dtype, out_dtype or dtype
    shape = (batch_size, s_kv, num_kv_heads, head_dim_qk, head_dim_vo, page_size)
    batch = PagedBatch(*shape, kv_dtype, random_actual_seq_len)
    q_lengths = _query_lengths(s_qo, batch.lengths, random_actual_seq_len)
    qo_indptr = offsets(q_lengths)
    q = rand(int(qo_indptr[-1]), num_qo_heads, head_dim_qk, dtype)
    buffers = [x.clone() for x in (qo_indptr, *batch.table)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", q.is_cuda, *buffers)
    heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo)
    dtypes = {"q_data_type": dtype, "kv_data_type": kv_dtype, "o_data_type": out_dtype}
    wrapper.plan(qo_indptr, *batch.table, *heads, causal=causal, **dtypes)
    reference = paged_prefill_trace(paged_kv_cache=(batch.k_cache, batch.v_cache)).reference
    # torch has no attention for mixed dtypes or different lengths.
    has_baseline = dtype == kv_dtype == out_dtype and not random_actual_seq_len
    return Bench(
        run={"fa2": lambda q, k, v: wrapper.run(q, (k, v))},
        args=(q, batch.k_cache, batch.v_cache),
        baseline=(lambda q, *_: torch_attention(q, batch.k, batch.v, causal)) if has_baseline else None,
        reference=lambda q, k, v: reference(
            *(q, k.to(dtype), v.to(dtype), qo_indptr, *batch.table[:2]), None, batch.table[2], causal
        )[0].to(out_dtype),
        bytes=batch.bytes + query_bytes(q, head_dim_vo, out_dtype),
        flops=attention_flops_with_actual_seq_lens(
            q_lengths, batch.lengths, head_dim_qk, head_dim_vo, num_qo_heads, causal
        ),
        flops_dtype=dtype,
    )


@case("BatchPrefillWithRaggedKVCacheWrapper", cpu=CPU, cuda=CUDA)
def ragged_prefill(
    batch_size: int,
    s_qo: int,
    s_kv: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int,
    causal: bool,
    dtype: torch.dtype,
    kv_dtype: Optional[torch.dtype] = None,
    out_dtype: Optional[torch.dtype] = None,
    random_actual_seq_len: bool = False,
) -> Bench:
    kv_dtype, out_dtype = kv_dtype or dtype, out_dtype or dtype
    kv_lengths = lengths(batch_size, s_kv, random_actual_seq_len)
    q_lengths = _query_lengths(s_qo, kv_lengths, random_actual_seq_len)
    indptr = offsets(q_lengths), offsets(kv_lengths)
    q = rand(int(indptr[0][-1]), num_qo_heads, head_dim_qk, dtype)
    k, v = (rand(int(indptr[1][-1]), num_kv_heads, n, kv_dtype) for n in (head_dim_qk, head_dim_vo))
    buffers = [x.clone() for x in indptr]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", q.is_cuda, *buffers)
    heads = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
    dtypes = {"q_data_type": dtype, "kv_data_type": kv_dtype, "o_data_type": out_dtype}
    wrapper.plan(*indptr, *heads, causal=causal, **dtypes)
    reference = ragged_prefill_trace().reference
    baseline = None
    if dtype == kv_dtype == out_dtype and not random_actual_seq_len:
        gathered = [x.view(batch_size, s_kv, *x.shape[1:]).transpose(1, 2).contiguous() for x in (k, v)]
        baseline = lambda q, *_: torch_attention(q, *gathered, causal)  # noqa: E731
    return Bench(
        run={"fa2": wrapper.run},
        args=(q, k, v),
        baseline=baseline,
        reference=lambda q, k, v: reference(q, k.to(dtype), v.to(dtype), *indptr, None, causal)[0].to(out_dtype),
        bytes=query_bytes(q, head_dim_vo, out_dtype) + nbytes(k, v),
        flops=attention_flops_with_actual_seq_lens(
            q_lengths, kv_lengths, head_dim_qk, head_dim_vo, num_qo_heads, causal
        ),
        flops_dtype=dtype,
    )


ONE = {"num_qo_heads": [32], "num_kv_heads": [8], "head_dim": [128], "causal": [True, False], "dtype": [bf16]}


@case("single_prefill_with_kv_cache", cpu=grid(s_qo=[1024], **ONE), cuda=grid(s_qo=[1024, 8192], **ONE))
def single_prefill(
    s_qo: int, num_qo_heads: int, num_kv_heads: int, head_dim: int, causal: bool, dtype: torch.dtype
) -> Bench:
    q = rand(s_qo, num_qo_heads, head_dim, dtype)
    k, v = (rand(s_qo, num_kv_heads, head_dim, dtype) for _ in range(2))
    gathered = [x.transpose(0, 1).contiguous()[None] for x in (k, v)]
    reference = single_prefill_trace().reference
    return Bench(
        run={"fa2": lambda q, k, v: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=causal)},
        args=(q, k, v),
        baseline=lambda q, *_: torch_attention(q, *gathered, causal),
        reference=lambda q, k, v: reference(q, k, v, causal),
        bytes=attention_bytes(q, k, v),
        flops=attention_flops(1, s_qo, s_qo, head_dim, head_dim, num_qo_heads, causal),
        flops_dtype=dtype,
    )


if __name__ == "__main__":
    main()
