# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.decode``: keys and values are read once, so the figure to read is the fraction of peak.

python benchmarks/bench_decode.py [-k Batch] [--device cpu] [--json FILE]

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
    query_bytes,
    torch_attention,
    workspace,
)
from harness import Bench, Run, bf16, case, e4m3, fp16, grid, main, rand

import flashinfer
from flashinfer._runtime.errors import ArgumentError
from flashinfer.cudnn.decode import CUDNN_AVAILABLE, cudnn_batch_decode_with_kv_cache
from flashinfer.trace.templates.decode import batch_decode_trace, single_decode_trace

HEADS = {"num_qo_heads": [32], "num_kv_heads": [8], "head_dim_qk": [128], "head_dim_vo": [128]}  # heads of an 8B model
CUDA = grid(batch_size=[1, 16, 64, 256], s_kv=[1024, 8192], page_size=[16], dtype=[bf16], **HEADS)
CUDA += grid(batch_size=[64], s_kv=[4096], page_size=[1, 64], dtype=[fp16], **HEADS)
CPU = grid(batch_size=[1, 8], s_kv=[1024], page_size=[16], dtype=[bf16, fp16], **HEADS)
ONE = {"num_qo_heads": [32], "num_kv_heads": [8], "head_dim": [128], "dtype": [bf16]}


def by_cudnn(batch: PagedBatch) -> Run:
    """Return a run of the same batch by cuDNN. cuDNN expects heads before tokens in a page, which a view provides."""
    counts = batch.indptr.diff()
    table = torch.zeros(batch.batch_size, int(counts.max()), dtype=torch.int32)
    table[torch.arange(table.shape[1]) < counts[:, None]] = batch.indices
    options = {"actual_seq_lens_kv": batch.lengths.int().view(-1, 1, 1, 1), "block_tables": table}
    scale, scratch = batch.head_dim_qk**-0.5, workspace()

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pages = (k.transpose(1, 2), v.transpose(1, 2))
        return cudnn_batch_decode_with_kv_cache(q, *pages, scale, scratch, max_sequence_kv=batch.s_kv, **options)

    return run


def cudnn_needs(q: torch.Tensor, *dtypes: torch.dtype) -> str:
    """Return what is missing to run a batch by cuDNN; nothing if it can."""
    if not CUDNN_AVAILABLE:
        return "it needs the package nvidia-cudnn-frontend (pip install nvidia-cudnn-frontend)"
    if not q.is_cuda:
        return "it needs --device cuda"
    return "" if all(dtype == q.dtype for dtype in dtypes) else "it needs one dtype for queries, cache and outputs"


@case("BatchDecodeWithPagedKVCacheWrapper", cpu=CPU, cuda=CUDA)
def batch_decode(
    batch_size: int,
    s_kv: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int,
    page_size: int,
    dtype: torch.dtype,
    use_tensor_cores: bool = False,
    kv_dtype: Optional[torch.dtype] = None,
    out_dtype: Optional[torch.dtype] = None,
    random_actual_seq_len: bool = False,
    s_qo: int = 1,
) -> Bench:
    if s_qo != 1:
        raise ArgumentError(f"BatchDecodeWithPagedKVCacheWrapper: s_qo is {s_qo}, expected 1 (it is decoding)")
    kv_dtype, out_dtype = kv_dtype or dtype, out_dtype or dtype
    shape = (batch_size, s_kv, num_kv_heads, head_dim_qk, head_dim_vo, page_size)
    batch = PagedBatch(*shape, kv_dtype, random_actual_seq_len)
    q = rand(batch_size, num_qo_heads, head_dim_qk, dtype)
    buffers = [x.clone() for x in batch.table]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", q.is_cuda, use_tensor_cores, *buffers)
    dtypes = {"q_data_type": dtype, "kv_data_type": kv_dtype, "o_data_type": out_dtype}
    wrapper.plan(*batch.table, num_qo_heads, num_kv_heads, head_dim_qk, page_size, **dtypes)
    reference = batch_decode_trace(paged_kv_cache=(batch.k_cache, batch.v_cache)).reference
    # torch has no attention for mixed dtypes or different lengths.
    has_baseline = dtype == kv_dtype == out_dtype and not random_actual_seq_len
    runs: dict[str, Run] = {"fa2": lambda q, k, v: wrapper.run(q, (k, v))}
    lack = cudnn_needs(q, kv_dtype, out_dtype)
    if not lack:
        runs["cudnn"] = by_cudnn(batch)
    return Bench(
        run=runs,
        args=(q, batch.k_cache, batch.v_cache),
        baseline=(lambda q, *_: torch_attention(q, batch.k, batch.v, causal=False)) if has_baseline else None,
        reference=lambda q, k, v: reference(
            *(q, k.to(dtype), v.to(dtype), *batch.table[:2]), kv_last_page_len=batch.table[2]
        )[0].to(out_dtype),
        bytes=batch.bytes + query_bytes(q, head_dim_vo, out_dtype),
        flops=attention_flops_with_actual_seq_lens(
            torch.ones_like(batch.lengths), batch.lengths, head_dim_qk, head_dim_vo, num_qo_heads, False
        ),
        flops_dtype=dtype,
        missing={"cudnn": lack} if lack else {},
    )


@case("single_decode_with_kv_cache", cpu=grid(s_kv=[1024, 8192], **ONE), cuda=grid(s_kv=[1024, 8192, 131072], **ONE))
def single_decode(s_kv: int, num_qo_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Bench:
    q = rand(num_qo_heads, head_dim, dtype)
    k, v = (rand(s_kv, num_kv_heads, head_dim, dtype) for _ in range(2))
    gathered = [x.transpose(0, 1).contiguous()[None] for x in (k, v)]
    reference = single_decode_trace().reference
    return Bench(
        run={"fa2": flashinfer.single_decode_with_kv_cache},
        args=(q, k, v),
        baseline=lambda q, *_: torch_attention(q[None], *gathered, causal=False)[0],
        reference=lambda q, k, v: reference(q, k, v),
        bytes=attention_bytes(q, k, v),
        flops=attention_flops(1, 1, s_kv, head_dim, head_dim, num_qo_heads, False),
        flops_dtype=dtype,
    )


@case("batch_decode_fp8_cache", cpu=grid(batch_size=[8], s_kv=[1024]), cuda=grid(batch_size=[64], s_kv=[8192]))
def batch_decode_fp8(batch_size: int, s_kv: int) -> Bench:
    """Decode with 8-bit keys and values and 16-bit queries: half of the bytes. torch has no such attention."""
    return batch_decode(batch_size, s_kv, 32, 8, 128, 128, 16, bf16, kv_dtype=e4m3)


if __name__ == "__main__":
    main()
