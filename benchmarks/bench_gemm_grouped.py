# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the fp8 products with scales of blocks and of grouped products; inputs are those of the traces.

python benchmarks/bench_gemm_grouped.py [-k deepgemm] [--device cpu] [--json FILE]
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from harness import Bench, bf16, case, e4m3, empty, grid, main, nbytes, rand

from flashinfer import gemm
from flashinfer.testing import Tolerance
from flashinfer.trace.templates import gemm_groupwise
from flashinfer.trace.templates.gemm_grouped import segment_gemm_run_trace

# Sums in another order, rounded to bf16; an element near zero is off by the error of a sum of K products.
SUMS = Tolerance(rtol=2**-7, atol=2e-2)
DENSE = {"cpu": grid(m=[64], n=[512], k=[512]), "cuda": grid(m=[64, 4096], n=[7168], k=[4096])}
# Experts of DeepSeek V3: a decode batch and a prompt.
GROUPED = {
    "cpu": grid(groups=[2], m=[128], n=[256], k=[256]),
    "cuda": grid(groups=[32], m=[64, 256], n=[4096], k=[7168]),
}


def _bench(function: Callable[..., Any], template: Any, inputs: dict[str, Any], out: torch.Tensor, flops: int) -> Bench:
    """Call ``function`` with the inputs of a template by keyword, and compare with the reference of the template."""
    names = list(inputs)

    def run(*values: Any) -> Any:
        return function(**dict(zip(names, values[:-1], strict=True)), out=values[-1])

    return Bench(
        run=run,
        args=(*inputs.values(), out),
        reference=lambda *values: template.reference(**dict(zip(names, values[:-1], strict=True))),
        bytes=nbytes(*(value for value in inputs.values() if isinstance(value, torch.Tensor)), out),
        flops=flops,
        flops_dtype=e4m3,
        tolerance=SUMS,
    )


def _device() -> torch.device:
    return torch.get_default_device()


@case("gemm_fp8_nt_groupwise", **DENSE)
def gemm_fp8_nt_groupwise(m: int, n: int, k: int, scale_major_mode: str = "K") -> Bench:
    template = gemm_groupwise.gemm_fp8_nt_groupwise_trace.choose(scale_major_mode=scale_major_mode)
    inputs = template.init(m=m, n=n, k=k, device=_device())
    return _bench(gemm.gemm_fp8_nt_groupwise, template, inputs, empty(m, n, bf16), 2 * m * n * k)


@case("gemm_fp8_nt_blockscaled", **DENSE)
def gemm_fp8_nt_blockscaled(m: int, n: int, k: int, scale_major_mode: str = "MN") -> Bench:
    template = gemm_groupwise.gemm_fp8_nt_blockscaled_trace.choose(scale_major_mode=scale_major_mode)
    inputs = template.init(m=m, n=n, k=k, device=_device())
    return _bench(gemm.gemm_fp8_nt_blockscaled, template, inputs, empty(m, n, bf16), 2 * m * n * k)


@case("group_gemm_fp8_nt_groupwise", **GROUPED)
def group_gemm_fp8_nt_groupwise(groups: int, m: int, n: int, k: int, scale_major_mode: str = "MN") -> Bench:
    rows = groups * m
    template = gemm_groupwise.group_gemm_fp8_nt_groupwise_trace.choose(scale_major_mode=scale_major_mode)
    inputs = template.init(cum_m=rows, groups=groups, n=n, k=k, device=_device())
    return _bench(gemm.group_gemm_fp8_nt_groupwise, template, inputs, empty(rows, n, bf16), 2 * rows * n * k)


@case("group_deepgemm_fp8_nt_groupwise", **GROUPED)
def group_deepgemm_fp8_nt_groupwise(groups: int, m: int, n: int, k: int) -> Bench:
    """Each group has its rows in one piece, a multiple of 128."""
    rows = groups * -(-m // 128) * 128
    template = gemm_groupwise.group_deepgemm_fp8_nt_groupwise_trace
    inputs = template.init(m=rows, groups=groups, n=n, k=k, device=_device())
    inputs["m_indices"] = inputs["m_indices"].sort().values
    return _bench(gemm.group_deepgemm_fp8_nt_groupwise, template, inputs, empty(rows, n, bf16), 2 * rows * n * k)


@case("batch_deepgemm_fp8_nt_groupwise", **GROUPED)
def batch_deepgemm_fp8_nt_groupwise(groups: int, m: int, n: int, k: int) -> Bench:
    template = gemm_groupwise.batch_deepgemm_fp8_nt_groupwise_trace
    inputs = template.init(m=m, groups=groups, n=n, k=k, device=_device())
    out = empty(groups, m, n, bf16)
    return _bench(gemm.batch_deepgemm_fp8_nt_groupwise, template, inputs, out, 2 * groups * m * n * k)


@case(
    "SegmentGEMMWrapper",
    cpu=grid(segments=[4], m=[16], n=[256], k=[256]),
    cuda=grid(segments=[8], m=[512], n=[4096], k=[4096]) + grid(segments=[64], m=[16], n=[4096], k=[4096]),
)
def segment_gemm(segments: int, m: int, n: int, k: int) -> Bench:
    x, weights, out = rand(segments * m, k, bf16), rand(segments, n, k, bf16), empty(segments * m, n, bf16)
    lengths = torch.full((segments,), m, dtype=torch.int64)
    wrapper = gemm.SegmentGEMMWrapper(torch.empty(1 << 20, dtype=torch.int8))
    template = segment_gemm_run_trace.choose(x=x, weights=weights, weight_column_major=True)
    return Bench(
        run=lambda x, weights, lengths, out: wrapper.run(x, weights, segments, True, out=out, seg_lens=lengths),
        args=(x, weights, lengths, out),
        reference=lambda x, weights, lengths, out: template.reference(x, weights, seg_lens=lengths),
        bytes=nbytes(x, weights, out),
        flops=2 * segments * m * n * k,
        tolerance=SUMS,
    )


if __name__ == "__main__":
    main()
