# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.topk``: one read of the scores, so the figure to read is the fraction of peak.

python benchmarks/bench_topk.py [-k top_k] [--device cpu] [--json FILE]
"""

from __future__ import annotations

import torch
from harness import Bench, bf16, case, fp32, grid, main, nbytes, rand

import flashinfer.topk as topk
from flashinfer.trace.templates import topk as templates

# A vocabulary; k of sampling, and of sparse attention.
CUDA = grid(batch_size=[1, 64, 512], vocab_size=[128256], k=[50, 2048], dtype=[fp32], ordered=[False, True])
CUDA += grid(batch_size=[512], vocab_size=[128256], k=[2048], dtype=[bf16], ordered=[False, True])
CPU = grid(batch_size=[1, 8], vocab_size=[128256], k=[50, 2048], dtype=[fp32], ordered=[True])
CPU += grid(batch_size=[8], vocab_size=[128256], k=[50], dtype=[bf16], ordered=[True])
# The indexer of sparse attention: one row per token of a decode step.
WINDOWS = grid(batch_size=[1, 64], max_len=[131072], k=[2048], dtype=[fp32])
CPU_WINDOWS = grid(batch_size=[8], max_len=[32768], k=[2048], dtype=[fp32])


@case("top_k", cpu=CPU, cuda=CUDA)
def top_k(batch_size: int, vocab_size: int, k: int, dtype: torch.dtype, ordered: bool) -> Bench:
    def run(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return topk.top_k(input, k, sorted=ordered)

    def reference(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return templates.top_k_trace.reference(input, k, sorted=ordered)

    x = rand(batch_size, vocab_size, dtype)
    return Bench(
        run=run,
        args=(x,),
        baseline=lambda input: torch.topk(input, k, sorted=ordered),
        reference=reference if ordered else None,  # the order is undefined if not `ordered`
        bytes=nbytes(x) + batch_size * k * (x.itemsize + 8),
    )


def _windows(batch_size: int, max_len: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers = torch.arange(batch_size, dtype=torch.int32)
    return rand(batch_size, max_len, dtype), numbers * max_len, torch.full_like(numbers, max_len)


def _torch_ragged(input: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    columns = torch.arange(input.shape[1], device=input.device)
    scores = input.masked_fill(columns >= lengths.unsqueeze(1), -torch.inf)
    indices = torch.topk(scores, k, sorted=False).indices.int()
    return torch.where(indices < lengths.unsqueeze(1), indices + offsets.unsqueeze(1), -1)


@case("top_k_ragged_transform", cpu=CPU_WINDOWS, cuda=WINDOWS)
def top_k_ragged_transform(batch_size: int, max_len: int, k: int, dtype: torch.dtype) -> Bench:
    x, offsets, lengths = _windows(batch_size, max_len, dtype)
    return Bench(
        run=lambda *args: topk.top_k_ragged_transform(*args, k, deterministic=True),
        args=(x, offsets, lengths),
        baseline=lambda *args: _torch_ragged(*args, k),
        reference=lambda *args: templates.top_k_ragged_transform_trace.reference(*args, k),
        bytes=nbytes(x) + batch_size * k * 4,
    )


@case("top_k_page_table_transform", cpu=CPU_WINDOWS, cuda=WINDOWS)
def top_k_page_table_transform(batch_size: int, max_len: int, k: int, dtype: torch.dtype) -> Bench:
    x, _, lengths = _windows(batch_size, max_len, dtype)
    table = torch.arange(batch_size * max_len // 64, dtype=torch.int32).view(batch_size, max_len // 64)

    def baseline(input: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        indices = _torch_ragged(input, torch.zeros_like(lengths), lengths, k)
        slots = table.gather(1, indices.clamp(min=0).long() // 64) * 64 + indices % 64
        return torch.where(indices < 0, -1, slots)

    return Bench(
        run=lambda *args: topk.top_k_page_table_transform(*args, k, deterministic=True, page_size=64),
        args=(x, table, lengths),
        baseline=baseline,
        reference=lambda *args: templates.top_k_page_table_transform_trace.reference(*args, k, page_size=64),
        bytes=nbytes(x) + batch_size * k * 4,
    )


@case("top_k_varlen", cpu=CPU_WINDOWS, cuda=WINDOWS)
def top_k_varlen(batch_size: int, max_len: int, k: int, dtype: torch.dtype) -> Bench:
    x, _, lengths = _windows(batch_size, max_len, dtype)
    return Bench(
        run=lambda *args: topk.top_k_varlen(*args, k)[0],
        args=(x, lengths),
        baseline=lambda x, lengths: _torch_ragged(x, torch.zeros_like(lengths), lengths, k),
        reference=lambda *args: templates.top_k_varlen_trace.reference(*args, k),
        bytes=nbytes(x) + batch_size * k * 4,
    )


if __name__ == "__main__":
    main()
