# SPDX-License-Identifier: Apache-2.0
"""Times of every tile, cluster and order of the SM90 GEMM kernels on the shapes of the performance targets, in one run.

python -m tests.hopper.tune [-k mm_bf16] [--json FILE]

Each variant is checked against fp32 before it is timed. Times are medians of single calls with L2 overwritten before
each. A star marks what the rule of gemm/sm90/choose.h picks; compare it with the best.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional

import torch

from flashinfer.jit.gemm import gen_gemm_modules, get_gemm_sm90_module, get_quantize_1x128_module, tiles_of

from .gemm_inputs import BATCHED, CONTIGUOUS, MASKED, PACKED, block_scales, dequantized, error, gemm, operands, poisoned


@dataclass(frozen=True)
class Case:
    """A product: ``groups`` of ``m`` rows each. ``max_m``: allocated rows of a masked group."""

    name: str
    kind: str
    m: int
    n: int
    k: int
    groups: int = 1
    grouping: int = BATCHED
    max_m: int = 0
    quantize: bool = False

    @property
    def flop(self) -> float:
        return 2.0 * self.groups * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        size = 2 if self.kind == "bf16" else 1
        return self.groups * (size * self.k * (self.m + self.n) + 2.0 * self.m * self.n)


CASES = [
    Case("mm_bf16_4kx7kx4k", "bf16", 4096, 7168, 4096),
    Case("mm_bf16_64x7kx4k", "bf16", 64, 7168, 4096),
    Case("mm_bf16_1x7kx4k", "bf16", 1, 7168, 4096),
    Case("mm_bf16_16x4kx14k", "bf16", 16, 4096, 14336),
    Case("bmm_fp8_8kx8kx8k", "fp8", 8192, 8192, 8192),
    Case("bmm_fp8_16x1kx4kx4k", "fp8", 1024, 4096, 4096, 16),
    Case("bmm_fp8_64x7kx4k", "fp8", 64, 7168, 4096),
    Case("bmm_fp8_1x7kx4k", "fp8", 1, 7168, 4096),
    Case("fp8_blockscale_4kx7kx4k", "fp8_block", 4096, 7168, 4096, quantize=True),
    Case("fp8_blockscale_4kx2112x7k", "fp8_block", 4096, 2112, 7168, quantize=True),
    Case("fp8_blockscale_4kx32kx512", "fp8_block", 4096, 32768, 512, quantize=True),
    Case("fp8_blockscale_64x7kx4k", "fp8_block", 64, 7168, 4096, quantize=True),
    Case("fp8_blockscale_1x7kx4k", "fp8_block", 1, 7168, 4096, quantize=True),
    Case("fp8_blockscale_128x24kx1536", "fp8_block", 128, 24576, 1536, quantize=True),
    Case("contiguous_fp8_8x4k_4kx7k", "fp8_block", 4096, 4096, 7168, 8, CONTIGUOUS),
    Case("contiguous_fp8_32x256_4kx7k", "fp8_block", 256, 4096, 7168, 32, CONTIGUOUS),
    Case("contiguous_fp8_128x128_1536x2k", "fp8_block", 128, 1536, 2048, 128, CONTIGUOUS),
    Case("masked_fp8_32x64_4kx7k", "fp8_block", 64, 4096, 7168, 32, MASKED, 256),
    Case("masked_fp8_128x16_1536x2k", "fp8_block", 16, 1536, 2048, 128, MASKED, 256),
    Case("masked_fp8_64x4_4kx4k", "fp8_block", 4, 4096, 4096, 64, MASKED, 256),
    Case("grouped_bf16_8x512_4kx4k", "bf16", 512, 4096, 4096, 8, PACKED),
    Case("grouped_bf16_64x16_4kx4k", "bf16", 16, 4096, 4096, 64, PACKED),
    Case("grouped_bf16_128x128_1536x2k", "bf16", 128, 1536, 2048, 128, PACKED),
]


def inputs(case: Case) -> dict[str, Any]:
    """Return operands, scales, group description and result of one call."""
    rows = case.max_m or case.m
    flat = case.grouping in (CONTIGUOUS, PACKED)
    a_shape = (case.groups * rows, case.k) if flat else (case.groups, rows, case.k)
    a, b = operands(case.kind, a_shape, (case.groups, case.n, case.k))
    scales: tuple[Optional[torch.Tensor], Optional[torch.Tensor]] = (None, None)
    if case.kind == "fp8_block":
        scales = (block_scales(a, b)[0], block_scales(b[:, :1], b)[1])
    described = {
        BATCHED: None,
        CONTIGUOUS: torch.arange(case.groups, dtype=torch.int32).repeat_interleave(rows),
        MASKED: torch.full((case.groups,), case.m, dtype=torch.int32),
        PACKED: torch.arange(case.groups + 1, dtype=torch.int32) * rows,
    }[case.grouping]
    groups = None if described is None else described.cuda()
    out = poisoned(*a.shape[:-1], case.n)
    return {"a": a, "b": b, "out": out, "scales": scales, "groups": groups}


def variants(case: Case) -> Iterator[dict[str, Any]]:
    """Yield the options of each kernel that can run a case."""
    for i, tile in enumerate(tiles_of(case.kind)):
        if tile.swapped:
            if case.m <= 256 and case.m / 2 <= tile.block_m < 2 * max(8, case.m):
                for split in (1, 2, 3, 4, 6, 8) if case.groups == 1 else (1, 2, 4):
                    if split <= tile.most_blocks:
                        yield {"tile": i, "cluster": split}
            continue
        if case.grouping == CONTIGUOUS and tile.block_m > 128:
            continue
        if case.m < 32:
            continue
        pairs = [(1, False), (2, False)] + ([(2, True)] if case.grouping == BATCHED else [])
        for (cluster, share_b), raster in itertools.product(pairs, (8, 16) if case.m * case.groups > 1024 else (8,)):
            yield {"tile": i, "cluster": cluster, "share_b": share_b, "raster": raster}


def chosen(case: Case) -> tuple[int, int, bool]:
    """Return tile, cluster and shared operand that the rule picks."""
    flat = case.grouping in (CONTIGUOUS, PACKED)
    rows = case.m * case.groups if flat else case.m
    module = get_gemm_sm90_module(case.kind)
    chosen = module.gemm_sm90_choose(rows, case.n, case.k, case.groups, case.grouping, False, False, 132)
    return chosen["tile"], chosen["cluster"], 2 if chosen["split_k"] and not chosen["swap_ab"] else chosen["share_b"]


def seconds(call: Callable[[], Any], budget_s: float = 0.012) -> float:
    """Return the median time of one call, with L2 overwritten before each: operands are read from memory."""
    flush = _flush()
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    count = int(min(40, max(11, budget_s / (time.perf_counter() - began))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) / 1e3 for start, end in events)


@functools.cache
def _flush() -> torch.Tensor:
    return torch.empty(512 << 20, dtype=torch.int8, device="cuda")


def check(case: Case, x: dict[str, Any]) -> float:
    """Return the relative error of the requested rows in the first and the last group."""
    worst = 0.0
    for g in {0, case.groups - 1}:
        flat = case.grouping in (CONTIGUOUS, PACKED)
        rows = slice(g * case.m, (g + 1) * case.m) if flat else slice(0, case.m)
        a, out = (x["a"], x["out"]) if flat else (x["a"][g], x["out"][g])
        a_scale, b_scale = x["scales"]
        a_scale = a_scale if flat or a_scale is None else a_scale[g]
        wide_a = dequantized(a, a_scale)[rows].float()
        wide_b = dequantized(x["b"][g], None if b_scale is None else b_scale[g]).float()
        worst = max(worst, error(out[rows], (wide_a @ wide_b.T).double()))
    return worst


def library(case: Case, x: dict[str, Any]) -> Optional[Callable[[], Any]]:
    """Return torch's call for the same shape, or None if torch has none."""
    if case.kind == "bf16" and case.grouping == BATCHED:
        return lambda: torch.matmul(x["a"], x["b"].mT, out=x["out"])
    if case.kind != "bf16" and case.grouping == BATCHED and case.groups == 1:
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(x["a"][0], x["b"][0].T, one, one, out_dtype=torch.bfloat16)
    return None


def quantizer(case: Case, pdl: bool = False) -> Callable[[], Any]:
    """Return the quantisation that precedes a block-scaled call."""
    x = torch.randn(case.m, case.k, device="cuda").bfloat16()
    codes = torch.empty(case.m, case.k, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.empty(case.k // 128, -(-case.m // 4) * 4, device="cuda")[:, : case.m]
    return lambda: get_quantize_1x128_module().quantize_1x128(codes, scales, x, pdl)


def quantized(case: Case, x: dict[str, Any], options: dict[str, Any]) -> Callable[[], Any]:
    """Return the quantisation and the product that starts to read weights meanwhile."""
    quantize = quantizer(case, True)

    def both() -> None:
        quantize()
        gemm(case.kind, **x, expected_m=case.m, pdl=True, weights_first=True, **options)

    return both


def tune(case: Case) -> dict[str, Any]:
    """Time all variants of a case and print them, the fastest last."""
    torch.manual_seed(0)
    x = inputs(case)
    lines = []
    for options in variants(case):
        x["out"].fill_(torch.nan)
        call = functools.partial(gemm, case.kind, **x, grouping=case.grouping, expected_m=case.m, **options)
        call()
        wrong = check(case, x)
        is_choice = (options["tile"], options.get("cluster", 1), options.get("share_b", False)) == chosen(case)
        lines.append({**options, "us": seconds(call) * 1e6, "error": wrong, "chosen": is_choice})
        if case.quantize:
            both = quantized(case, x, options)
            lines[-1]["with quantizing"] = seconds(both) * 1e6
    lines.sort(key=lambda line: -line["us"])
    print(f"\n{case.name}: {case.flop / 1e9:.0f} GFLOP, {case.bytes / 1e6:.0f} MB")
    for line in lines:
        star, bad = "*" if line["chosen"] else " ", "" if line["error"] < 2.5e-3 else f"  WRONG: {line['error']:.1e}"
        form = f"cluster {line.get('cluster', 1)}{'b' if line.get('share_b') else ' '} raster {line.get('raster', 0):2}"
        rates = f"{case.flop / line['us'] / 1e6:7.0f} TFLOP/s {case.bytes / line['us'] / 1e6:5.2f} TB/s"
        both = f"  with quantizing {line['with quantizing']:.2f} us" if "with quantizing" in line else ""
        print(f" {star} {tiles_of(case.kind)[line['tile']].unit:16} {form} {line['us']:8.2f} us {rates}{both}{bad}")
    extra = {"quantize": quantizer(case)} if case.quantize else {}
    torch_call = library(case, x)
    if torch_call is not None:
        extra["torch"] = torch_call
    others = {name: seconds(call) * 1e6 for name, call in extra.items()}
    for name, us in others.items():
        print(f"   {name}: {us:.2f} us")
    return {"case": case.name, "variants": lines, **others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only cases whose name contains this")
    parser.add_argument("--json", help="write all figures to this file")
    arguments = parser.parse_args()
    from flashinfer.jit import build_jit_specs

    build_jit_specs(list(gen_gemm_modules()))
    results = [tune(case) for case in CASES if arguments.k in case.name]
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
