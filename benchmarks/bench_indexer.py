# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.indexer``: scores are bound by the bytes of the keys, the schedule by latency.

python benchmarks/bench_indexer.py [-k logits] [--device cpu] [--json FILE]
"""

from __future__ import annotations

import torch
from harness import Bench, case, main, nbytes, rand

from flashinfer.indexer import (
    compute_paged_mqa_logits_schedule,
    fp8_paged_mqa_logits,
    fp8_ragged_mqa_logits,
    padded_seq_len,
)
from flashinfer.trace.templates import indexer as templates

# DeepSeek-V3.2 with and without a draft token, one long request, and Step.
CUDA = [
    {"batch_size": 64, "seq_len": 8192, "heads": 64, "head_dim": 128, "next_n": 1, "block_size": 64},
    {"batch_size": 64, "seq_len": 8192, "heads": 64, "head_dim": 128, "next_n": 2, "block_size": 64},
    {"batch_size": 1, "seq_len": 131072, "heads": 64, "head_dim": 128, "next_n": 1, "block_size": 64},
    {"batch_size": 64, "seq_len": 8192, "heads": 8, "head_dim": 256, "next_n": 1, "block_size": 32},
]
CPU = [{"batch_size": 2, "seq_len": 1024, "heads": 64, "head_dim": 128, "next_n": 1, "block_size": 64}]


@case("fp8_paged_mqa_logits", cpu=CPU, cuda=CUDA)
def logits(batch_size: int, seq_len: int, heads: int, head_dim: int, next_n: int, block_size: int) -> Bench:
    pages, rows = batch_size * seq_len // block_size, batch_size * next_n
    values = rand(pages, block_size * head_dim).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (rand(pages, block_size).abs() + 0.5).view(torch.uint8).view(pages, -1)
    kv = torch.cat((values, scales), 1).view(pages, block_size, 1, head_dim + 4)
    q = rand(batch_size, next_n, heads, head_dim).to(torch.float8_e4m3fn)
    weights, tables = rand(rows, heads), torch.randperm(pages).int().view(batch_size, -1)
    lengths = torch.full((batch_size,), seq_len, dtype=torch.int32)
    meta, out = compute_paged_mqa_logits_schedule(lengths), torch.empty(rows, padded_seq_len(seq_len))
    return Bench(
        run=lambda *x: fp8_paged_mqa_logits(*x[:5], seq_len, schedule_meta=x[5], out=x[6]),
        args=(q, kv, weights, tables, lengths, meta, out),
        reference=lambda *x: templates.fp8_paged_mqa_logits_trace.reference(*x[:5], seq_len),
        tolerance=(2e-2, 2e-2),
        bytes=nbytes(q, kv, weights, tables, out),
        flops=2 * rows * heads * head_dim * seq_len,
        flops_dtype=torch.float8_e4m3fn,
    )


@case(
    "fp8_ragged_mqa_logits",
    cpu=[{"tokens": 16, "keys": 512, "heads": 64, "head_dim": 128}],
    cuda=[{"tokens": tokens, "keys": 8192, "heads": 64, "head_dim": 128} for tokens in (256, 4096)],
)
def ragged(tokens: int, keys: int, heads: int, head_dim: int) -> Bench:
    """The last tokens of one prompt, each of which sees what comes before it."""
    q, k = (rand(*shape, head_dim).to(torch.float8_e4m3fn) for shape in ((tokens, heads), (keys,)))
    scales, weights, out = rand(keys).abs() + 0.5, rand(tokens, heads), torch.zeros(tokens, keys)
    starts, ends = torch.zeros(tokens).int(), torch.arange(keys - tokens + 1, keys + 1).int()
    return Bench(
        run=lambda *x: fp8_ragged_mqa_logits(*x[:6], out=x[6]),
        args=(q, k, scales, weights, starts, ends, out),
        reference=lambda *x: templates.fp8_ragged_mqa_logits_trace.reference(*x[:6]),
        tolerance=(2e-2, 2e-2),
        bytes=nbytes(q, k, scales, weights, out),
        flops=2 * heads * head_dim * int(ends.sum()),
        flops_dtype=torch.float8_e4m3fn,
    )


@case("compute_paged_mqa_logits_schedule", cpu=[{"batch_size": 256}], cuda=[{"batch_size": 256}])
def schedule(batch_size: int) -> Bench:
    lengths = torch.randint(0, 8193, (batch_size,), dtype=torch.int32)
    out = compute_paged_mqa_logits_schedule(lengths)
    return Bench(
        run=lambda x, y: compute_paged_mqa_logits_schedule(x, out=y),
        args=(lengths, out),
        reference=lambda x, y: templates.compute_paged_mqa_logits_schedule_trace.reference(x, out=y),
        bytes=nbytes(lengths, out),
    )


if __name__ == "__main__":
    main()
