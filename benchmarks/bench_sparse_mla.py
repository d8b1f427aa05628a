# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of sparse MLA: each token attends to 2048 selected rows of the cache.

Planned as serving engines do it, or by lists of indices.

Bound by the bytes of the selected rows and, with 128 heads, by the tensor cores as well.

python benchmarks/bench_sparse_mla.py [--device cpu] [--json FILE]
"""

from __future__ import annotations

import torch
from attention_inputs import workspace
from harness import Bench, bf16, case, e4m3, main, nbytes, rand

import flashinfer
from flashinfer.trace.templates.mla import mla_paged_reference
from flashinfer.trace.templates.sparse_mla import sparse_mla_trace

#: Cache type, heads, rotary columns, kind of scale. The cache has 8192 rows for each token, of which 2048 are selected.
CUDA = [
    {"tokens": 64, "top_k": 2048, "num_heads": 16, "head_dim_kpe": 64, "kv_dtype": bf16, "scales": "none"},
    {"tokens": 64, "top_k": 2048, "num_heads": 128, "head_dim_kpe": 64, "kv_dtype": bf16, "scales": "none"},
    {"tokens": 64, "top_k": 2048, "num_heads": 16, "head_dim_kpe": 0, "kv_dtype": e4m3, "scales": "tensor"},
    {"tokens": 64, "top_k": 2048, "num_heads": 16, "head_dim_kpe": 0, "kv_dtype": e4m3, "scales": "group"},
    {"tokens": 64, "top_k": 2048, "num_heads": 128, "head_dim_kpe": 0, "kv_dtype": e4m3, "scales": "tensor"},
]
CPU = [{"tokens": 2, "top_k": 256, "num_heads": 16, "head_dim_kpe": 64, "kv_dtype": bf16, "scales": "none"}]
SCALE = 192**-0.5


@case("sparse_mla", cpu=CPU, cuda=CUDA)
def sparse_mla(tokens: int, top_k: int, num_heads: int, head_dim_kpe: int, kv_dtype: torch.dtype, scales: str) -> Bench:
    rows = tokens * 4 * top_k
    ids = torch.cat([torch.randperm(rows)[:top_k] for _ in range(tokens)]).int()
    cache = rand(rows, 1, 512 + head_dim_kpe).to(kv_dtype)
    ckv, kpe = cache[..., :512], cache[..., 512:]
    q_nope, q_pe = (rand(tokens, num_heads, n, bf16) for n in (512, head_dim_kpe))
    offsets, lengths = torch.arange(tokens + 1).int(), torch.full((tokens,), top_k).int()
    tables = (offsets, offsets * top_k, ids, lengths)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(), q_nope.is_cuda, *[x.clone() for x in tables])
    is_hopper = q_nope.is_cuda and torch.cuda.get_device_capability()[0] == 9
    if is_hopper:  # the backend that engines ask for
        buffers = [x.clone() for x in tables]
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(), True, *buffers, backend="fa3")
    wrapper.plan(*tables, num_heads, 512, head_dim_kpe, 1, False, SCALE, bf16, kv_dtype)
    options = {}
    if scales == "tensor":
        options = {"ckv_scale": 0.02, "kpe_scale": 1.0}
    elif scales == "group":
        options = {"ckv_scale_arr": rand(rows, 1, 4).abs() * 0.02 + 0.01, "kpe_scale": 1.0}

    def reference(*args: torch.Tensor) -> torch.Tensor:
        ckv = args[2].float()
        if scales == "tensor":
            ckv = ckv * 0.02
        elif scales == "group":
            ckv = ckv * options["ckv_scale_arr"].repeat_interleave(128, -1).to(ckv.device)
        return mla_paged_reference(*args[:2], ckv, args[3].float(), *tables, False, SCALE)

    row_bytes = (512 + head_dim_kpe) * cache.itemsize + (16 if scales == "group" else 0)
    return Bench(
        run={"fa3" if is_hopper else "fa2": lambda *args: wrapper.run(*args, **options)},
        args=(q_nope, q_pe, ckv, kpe),
        reference=reference,
        tolerance=(2e-2, 2e-2),
        bytes=nbytes(q_nope, q_pe, q_nope, ids) + tokens * top_k * row_bytes,
        flops=2 * tokens * num_heads * top_k * (2 * 512 + head_dim_kpe),
        flops_dtype=bf16,
    )


def packed_cache(rows: int) -> torch.Tensor:
    """Return rows of 656 bytes: 512 e4m3 numbers, four scales, 64 bfloat16 numbers."""
    latent, scales, rotary = rand(rows, 512).to(e4m3), rand(rows, 4).abs() + 0.5, rand(rows, 64, bf16)
    return torch.cat([x.view(torch.uint8) for x in (latent, scales, rotary)], 1).unsqueeze(1)


LISTS = [
    {"tokens": tokens, "top_k": 2048, "num_heads": heads, "kv_dtype": kv_dtype}
    for tokens, heads, kv_dtype in (
        *((64, heads, kv_dtype) for heads in (16, 128) for kv_dtype in (bf16, torch.uint8)),
        (64, 16, e4m3),
        (1, 128, torch.uint8),
        (4096, 128, bf16),
    )
]
CPU_LISTS = [{"tokens": 2, "top_k": 256, "num_heads": 16, "kv_dtype": kv_dtype} for kv_dtype in (bf16, torch.uint8)]


@case("sparse_mla_lists", cpu=CPU_LISTS, cuda=LISTS)
def sparse_mla_lists(tokens: int, top_k: int, num_heads: int, kv_dtype: torch.dtype) -> Bench:
    """The function of its own, which takes lists of indices and plans nothing."""
    rows = min(tokens, 64) * 4 * top_k
    cache = packed_cache(rows) if kv_dtype is torch.uint8 else rand(rows, 1, 576).to(kv_dtype)
    ids = torch.stack([torch.randperm(rows)[:top_k] for _ in range(tokens)]).int()
    q, scales = rand(tokens, num_heads, 576, bf16), {"kv_scale": 0.02} if kv_dtype is e4m3 else {}
    return Bench(
        run=lambda *args: flashinfer.sparse_mla(*args, SCALE, **scales),
        args=(q, cache, ids),
        reference=lambda *args: sparse_mla_trace.reference(*args, SCALE, **scales)[0],
        tolerance=(2e-2, 2e-2),
        bytes=nbytes(q, ids) + tokens * num_heads * 1024 + tokens * top_k * cache.shape[-1] * cache.itemsize,
        flops=2 * tokens * num_heads * top_k * (512 + 576),
        flops_dtype=bf16,
    )


if __name__ == "__main__":
    main()
