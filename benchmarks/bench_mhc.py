# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.mhc``: bound by memory, so the figure to read is the fraction of peak.

python benchmarks/bench_mhc.py [-k post] [--device cpu] [--json FILE]
"""

from __future__ import annotations

import torch
from harness import Bench, bf16, case, grid, main, nbytes, rand

import flashinfer.mhc as mhc
from flashinfer.trace.templates import mhc as templates

# Hidden width of DeepSeek V4; a decode batch and a prompt.
CUDA = grid(num_tokens=[64, 4096], hidden_size=[7168])
CPU = grid(num_tokens=[64], hidden_size=[7168])


@case("mhc_post", cpu=CPU, cuda=CUDA)
def mhc_post(num_tokens: int, hidden_size: int) -> Bench:
    x, residual = rand(num_tokens, hidden_size, bf16), rand(num_tokens, 4, hidden_size, bf16)
    post, comb = rand(num_tokens, 4), rand(num_tokens, 4, 4)
    return Bench(
        run=mhc.mhc_post,
        args=(x, residual, post, comb),
        baseline=lambda x, r, p, c: (x.unsqueeze(-2) * p.unsqueeze(-1) + c.mT @ r.float()).bfloat16(),
        reference=lambda *args: templates.mhc_post_trace.reference(*args),
        bytes=nbytes(x, residual, residual, post, comb),
    )


def _pre_arguments(num_tokens: int, hidden_size: int) -> tuple[torch.Tensor, ...]:
    residual = rand(num_tokens, 4, hidden_size, bf16)
    mix, scale, base = rand(num_tokens, 24), torch.tensor([1.0, 1.0, 1.0]), torch.full((24,), 0.1)
    return mix, residual.float().square().sum((1, 2)), residual, scale, base


def _moved(mix: torch.Tensor, residual: torch.Tensor) -> int:
    return nbytes(mix, residual) + nbytes(residual) // 4 + nbytes(mix)


@case("mhc_pre_big_fuse", cpu=CPU, cuda=CUDA)
def mhc_pre_big_fuse(num_tokens: int, hidden_size: int) -> Bench:
    args = _pre_arguments(num_tokens, hidden_size)
    return Bench(
        run=lambda *a: mhc.mhc_pre_big_fuse(*a, 4 * hidden_size),
        args=args,
        reference=lambda *a: templates.mhc_pre_big_fuse_trace.reference(*a, 4 * hidden_size),
        bytes=_moved(args[0], args[2]),
    )


@case("mhc_pre_big_fuse_with_prenorm", cpu=CPU, cuda=CUDA)
def mhc_pre_big_fuse_with_prenorm(num_tokens: int, hidden_size: int) -> Bench:
    mix, _, residual, scale, base = _pre_arguments(num_tokens, hidden_size)
    return Bench(
        run=mhc.mhc_pre_big_fuse_with_prenorm,
        args=(mix, residual, scale, base),
        reference=lambda *a: templates.mhc_pre_big_fuse_with_prenorm_trace.reference(*a),
        bytes=_moved(mix, residual),
    )


if __name__ == "__main__":
    main()
