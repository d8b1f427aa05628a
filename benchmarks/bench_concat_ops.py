# SPDX-License-Identifier: Apache-2.0
"""Benchmark of ``flashinfer.concat_ops``: a copy, so the figure to read is the fraction of peak.

python benchmarks/bench_concat_ops.py [--device cpu] [--json FILE]
"""

from __future__ import annotations

import torch
from harness import Bench, bf16, case, e4m3, empty, grid, main, nbytes, rand

from flashinfer.concat_ops import concat_mla_k as op
from flashinfer.concat_ops import concat_mla_kv_quant_fp8 as quantize
from flashinfer.trace.templates.concat_ops import concat_mla_k_trace, concat_mla_kv_quant_fp8_trace


def _torch_concat(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
    k[..., :128] = k_nope
    k[..., 128:] = k_rope


@case(
    "concat_mla_k",
    cpu=grid(batch_size=[1, 64, 1024], dtype=[bf16]),
    cuda=grid(batch_size=[1, 64, 4096], dtype=[bf16]) + grid(batch_size=[4096], dtype=[e4m3]),
)
def concat_mla_k(batch_size: int, dtype: torch.dtype) -> Bench:
    """k_nope is a slice of the (tokens, heads, 128 + 128) projection that also holds v, as in DeepSeek-V3."""
    k = empty(batch_size, 128, 192, dtype)
    k_nope, k_rope = rand(batch_size, 128, 256, dtype)[..., :128], rand(batch_size, 1, 64, dtype)
    return Bench(
        run=op,
        args=(k, k_nope, k_rope),
        results=(0,),
        baseline=_torch_concat,
        reference=lambda k, k_nope, k_rope: concat_mla_k_trace.reference(k.clone(), k_nope, k_rope),
        bytes=nbytes(k, k_rope) + k.numel() * 2 // 3 * k.element_size(),
    )


@case("concat_mla_kv_quant_fp8", cpu=grid(batch_size=[64]), cuda=grid(batch_size=[64, 4096]))
def concat_mla_kv_quant_fp8(batch_size: int) -> Bench:
    kv, rope = rand(batch_size, 128, 256, bf16), rand(batch_size, 64, bf16)
    reference = concat_mla_kv_quant_fp8_trace.reference
    key, value = empty(batch_size, 128, 192, e4m3), empty(batch_size, 128, 128, e4m3)
    return Bench(
        run=quantize,
        args=(kv, rope, key, value),
        reference=lambda kv, rope, *_: reference(kv, rope),
        bytes=nbytes(kv, rope, key, value),
    )


if __name__ == "__main__":
    main()
