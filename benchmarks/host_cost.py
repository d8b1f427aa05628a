# SPDX-License-Identifier: Apache-2.0
"""Host time of repeated calls, one line for each family: the time until a call returns, without waiting for the GPU.

    taskset -c 3 python benchmarks/host_cost.py [--device cuda] [--families dense,moe] [--calls 2000] [--json FILE]

``us`` is the minimum over blocks of 10 calls, ``median`` their median; the GPU is synchronised between blocks, so that
the queue of launches never fills up. Shapes are small: the GPU must not hold the host up. Lines that begin with
``torch`` are bare calls of torch for comparison; ``own`` has as many weights as our kernel needs to be chosen
(gemm/decide.py); ``auto`` is that backend with nothing tuned, ``tuned`` the same after tuning; ``empty launch`` is
``torch.Tensor.zero_`` of one element. Pin the process to one core: cores of one machine differ by a factor of two or
more. On the CPU kernels are part of the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any, Callable

import torch

import flashinfer
from flashinfer import gemm
from flashinfer.fused_moe import cutlass_fused_moe

Call = Callable[[], Any]
BF16, E4M3, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
BLOCK = 10


def dense(device: str) -> dict[str, Call]:
    w = torch.randn(512, 512, device=device, dtype=BF16)
    few, many = (torch.randn(m, 512, device=device, dtype=BF16) for m in (4, 64))
    b, out = w.t(), torch.empty(64, 512, device=device, dtype=BF16)
    a8, few8, w8 = many.to(E4M3)[None], few.to(E4M3)[None], w.to(E4M3)[None].mT
    one, scale = torch.ones((), device=device), torch.ones(4, 4, device=device)
    many3, b3, few_out, rows8, a8_2d, w8_2d = many[None], b[None], out[:4], w8[0].T, a8[0], w8[0]
    row_scale = torch.ones(64, 4, device=device)
    large = w.repeat(40, 1)
    large_b, large_out = large.t(), torch.empty(4, 20480, device=device, dtype=BF16)
    few3, large_b3, large8, large3_out = few[None], large_b[None], large.to(E4M3)[None].mT, large_out[None]
    routed, router = (
        torch.ones(4, 7168, device=device, dtype=BF16),
        torch.ones(128, 7168, device=device, dtype=BF16).t(),
    )
    router_out = torch.empty(4, 128, device=device, dtype=BF16)
    calls: dict[str, Call] = {
        "torch.mm": lambda: torch.mm(many, b),
        "torch.mm out=": lambda: torch.mm(many, b, out=out),
        "mm_bf16 through torch": lambda: flashinfer.mm_bf16(many, b),
        "mm_bf16 through torch out=": lambda: flashinfer.mm_bf16(many, b, out=out),
        "mm_bf16 own": lambda: flashinfer.mm_bf16(few, large_b),
        "mm_bf16 own out=": lambda: flashinfer.mm_bf16(few, large_b, out=large_out),
        "mm_bf16 auto": lambda: flashinfer.mm_bf16(few, large_b, backend="auto"),
        "mm_bf16 auto out=": lambda: flashinfer.mm_bf16(few, large_b, out=large_out, backend="auto"),
        "mm_bf16 auto through torch": lambda: flashinfer.mm_bf16(many, b, backend="auto"),
        "torch.bmm": lambda: torch.bmm(many3, b3),
        "bmm_bf16 through torch": lambda: flashinfer.bmm_bf16(many3, b3),
        "bmm_bf16 own": lambda: flashinfer.bmm_bf16(few3, large_b3),
        "bmm_bf16 auto": lambda: flashinfer.bmm_bf16(few3, large_b3, backend="auto"),
        "bmm_fp8 own": lambda: flashinfer.bmm_fp8(few8, large8, one, one, BF16),
        "bmm_fp8 own out=": lambda: flashinfer.bmm_fp8(few8, large8, one, one, BF16, large3_out),
        "bmm_fp8 auto": lambda: flashinfer.bmm_fp8(few8, large8, one, one, BF16, backend="auto"),
        "tinygemm_bf16": lambda: gemm.tinygemm_bf16(few, w, few_out),
        "mm_M1_16": lambda: gemm.mm_M1_16_K7168_N128(routed, router, router_out),
        "fp8_blockscale_gemm_sm90": lambda: gemm.fp8_blockscale_gemm_sm90(many, rows8, None, scale),
        "fp8_blockscale_gemm_sm90 out=": lambda: gemm.fp8_blockscale_gemm_sm90(many, rows8, None, scale, out),
        "gemm_fp8_nt_groupwise": lambda: gemm.gemm_fp8_nt_groupwise(a8_2d, rows8, row_scale, scale, "K"),
        "gemm_fp8_nt_groupwise auto": lambda: gemm.gemm_fp8_nt_groupwise(
            a8_2d, rows8, row_scale, scale, "K", backend="auto"
        ),
        "gemm_fp8_nt_blockscaled": lambda: gemm.gemm_fp8_nt_blockscaled(a8_2d, rows8, scale[:1], scale, "K"),
    }
    if device == "cuda":
        calls["torch._scaled_mm"] = lambda: torch._scaled_mm(
            a8_2d, w8_2d, one, one, out_dtype=BF16, use_fast_accum=True
        )
        calls["bmm_fp8 through torch"] = lambda: flashinfer.bmm_fp8(a8, w8, one, one, BF16)
        calls["bmm_fp8 auto through torch"] = lambda: flashinfer.bmm_fp8(a8, w8, one, one, BF16, backend="auto")
    return calls


def tuned(device: str) -> dict[str, Call]:
    """Return calls with "auto" whose choice was measured: torch, our kernel or one of its tiles. Tuning takes a while.

    Keep this family last: later ones would find a tuner that was used.
    """
    w = torch.randn(512, 512, device=device, dtype=BF16)
    few = torch.randn(4, 512, device=device, dtype=BF16)
    b, few8, w8, one = w.t(), few.to(E4M3)[None], w.to(E4M3)[None].mT, torch.ones((), device=device)
    calls: dict[str, Call] = {
        "mm_bf16 tuned": lambda: flashinfer.mm_bf16(few, b, backend="auto"),
        "bmm_fp8 tuned": lambda: flashinfer.bmm_fp8(few8, w8, one, one, BF16, backend="auto"),
    }
    with flashinfer.autotune(tuning_buckets=(4,)):
        for call in calls.values():
            call()
    return calls


def grouped(device: str) -> dict[str, Call]:
    x = torch.randn(256, 512, device=device, dtype=BF16)
    w = torch.randn(2, 512, 512, device=device, dtype=BF16)
    x8, w8 = x.to(E4M3), w.to(E4M3)
    x_scale, w_scale = torch.ones(256, 4, device=device), torch.ones(2, 4, 4, device=device)
    indices = torch.arange(2, device=device, dtype=INT32).repeat_interleave(128)
    indptr, counts = torch.tensor([0, 128, 256], device=device).int(), torch.tensor([5, 9], device=device).int()
    out = torch.empty(256, 512, device=device, dtype=BF16)
    batch_out = out.view(2, 128, 512)
    segments = gemm.SegmentGEMMWrapper(torch.empty(1, device=device, dtype=torch.uint8))
    packed = (x8, w8, x_scale, w_scale, indptr)
    batch = (x8.view(2, 128, 512), w8, x_scale.view(2, 128, 4), w_scale, counts, 8)
    return {
        "group_deepgemm out=": lambda: gemm.group_deepgemm_fp8_nt_groupwise(x8, w8, x_scale, w_scale, indices, out=out),
        "group_deepgemm": lambda: gemm.group_deepgemm_fp8_nt_groupwise(x8, w8, x_scale, w_scale, indices),
        "batch_deepgemm out=": lambda: gemm.batch_deepgemm_fp8_nt_groupwise(*batch, out=batch_out),
        "batch_deepgemm": lambda: gemm.batch_deepgemm_fp8_nt_groupwise(*batch),
        "grouped_mm_bf16": lambda: flashinfer.grouped_mm_bf16(x, w, indptr),
        "grouped_mm_bf16 auto": lambda: flashinfer.grouped_mm_bf16(x, w, indptr, backend="auto"),
        "grouped_mm_fp8": lambda: flashinfer.grouped_mm_fp8(x8, w8, indptr),
        "grouped_mm_fp8 auto": lambda: flashinfer.grouped_mm_fp8(x8, w8, indptr, backend="auto"),
        "group_gemm_fp8_nt_groupwise": lambda: gemm.group_gemm_fp8_nt_groupwise(*packed, scale_major_mode="K"),
        "group_gemm_fp8_nt_groupwise auto": lambda: gemm.group_gemm_fp8_nt_groupwise(
            *packed, scale_major_mode="K", backend="auto"
        ),
        "SegmentGEMMWrapper.run": lambda: segments.run(x, w, 2, True, seg_indptr=indptr),
    }


def moe(device: str) -> dict[str, Call]:
    experts, hidden, inner = 8, 512, 512
    x = torch.randn(4, hidden, device=device, dtype=BF16)
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]], device=device, dtype=INT32)
    weights = torch.full((4, 2), 0.5, device=device)
    w1 = torch.randn(experts, 2 * inner, hidden, device=device, dtype=BF16)
    w2 = torch.randn(experts, hidden, inner, device=device, dtype=BF16)
    scales = [torch.ones(experts, n // 128, k // 128, device=device) for n, k in ((2 * inner, hidden), (hidden, inner))]
    block = {"quant_scales": scales, "use_deepseek_fp8_block_scale": True}
    w1_8, w2_8 = w1.to(E4M3), w2.to(E4M3)
    out, space = torch.empty_like(x), torch.empty(1 << 22, device=device, dtype=torch.uint8)
    more = (x.repeat(8, 1), ids.repeat(8, 1), weights.repeat(8, 1))  # 32 tokens: several launches
    return {
        "moe bf16": lambda: cutlass_fused_moe(x, ids, weights, w1, w2, BF16, quant_scales=[]),
        "moe bf16 out=, workspace": lambda: cutlass_fused_moe(
            x, ids, weights, w1, w2, BF16, quant_scales=[], output=out, workspace_buffer=space
        ),
        "moe fp8 block": lambda: cutlass_fused_moe(x, ids, weights, w1_8, w2_8, BF16, **block),
        "moe bf16 32 tokens": lambda: cutlass_fused_moe(*more, w1, w2, BF16, quant_scales=[]),
        "moe fp8 block 32 tokens": lambda: cutlass_fused_moe(*more, w1_8, w2_8, BF16, **block),
    }


def small_ops(device: str) -> dict[str, Call]:
    x, weight = torch.randn(8, 512, device=device, dtype=BF16), torch.ones(512, device=device, dtype=BF16)
    out, one = torch.empty_like(x), torch.zeros(1, device=device)
    probs = torch.full((4, 1024), 1 / 1024, device=device)
    return {
        "empty launch": lambda: one.zero_(),
        "rmsnorm out=": lambda: flashinfer.rmsnorm(x, weight, out=out),
        "rmsnorm": lambda: flashinfer.rmsnorm(x, weight),
        "silu_and_mul": lambda: flashinfer.silu_and_mul(x),
        "sampling_from_probs": lambda: flashinfer.sampling_from_probs(probs),
    }


def attention(device: str) -> dict[str, Call]:
    heads, kv_heads, dim, page, requests = 8, 2, 128, 16, 4
    space = torch.empty(32 << 20, dtype=torch.uint8, device=device)
    indptr = torch.arange(requests + 1, dtype=INT32) * 2
    indices = torch.arange(2 * requests, dtype=INT32, device=device)
    last = torch.full((requests,), page, dtype=INT32)
    cache = torch.randn(2 * requests, 2, page, kv_heads, dim, device=device).half()
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space)
    decode.plan(indptr, indices, last, heads, kv_heads, dim, page, q_data_type=torch.float16)
    q = torch.randn(requests, heads, dim, device=device).half()
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty_like(space))
    rows = torch.arange(requests + 1, dtype=INT32) * 64
    ragged.plan(rows, rows, heads, kv_heads, dim, causal=True, q_data_type=torch.float16)
    query = torch.randn(64 * requests, heads, dim, device=device).half()
    key, value = (torch.randn(64 * requests, kv_heads, dim, device=device).half() for _ in range(2))
    out, one = torch.empty_like(query), q[0]
    mla = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty_like(space))
    latent = torch.randn(2 * requests, page, 576, device=device, dtype=BF16)
    q_mla = torch.randn(requests, 16, 576, device=device, dtype=BF16)
    lengths = torch.full((requests,), 2 * page, dtype=INT32)
    tokens = torch.arange(requests + 1, dtype=INT32)
    mla.plan(tokens, indptr, indices, lengths, 16, 512, 64, page, False, 0.1, BF16, BF16)
    nope, rope, c, k_rope = q_mla[..., :512], q_mla[..., 512:], latent[..., :512], latent[..., 512:]
    return {
        "decode run": lambda: decode.run(q, cache),
        "ragged prefill run": lambda: ragged.run(query, key, value),
        "ragged prefill run out=": lambda: ragged.run(query, key, value, out=out),
        "mla run": lambda: mla.run(nope, rope, c, k_rope),
        "single_decode": lambda: flashinfer.single_decode_with_kv_cache(one, key, value),
        "single_prefill": lambda: flashinfer.single_prefill_with_kv_cache(query, key, value),
    }


FAMILIES = {x.__name__: x for x in (small_ops, dense, grouped, moe, attention, tuned)}


def measure(call: Call, calls: int, device: str) -> tuple[float, float]:
    """Return minimum and median over blocks, in microseconds per call."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(BLOCK):
        call()
    wait()
    blocks = []
    for _ in range(max(1, calls // BLOCK)):
        begin = time.perf_counter()
        for _ in range(BLOCK):
            call()
        blocks.append((time.perf_counter() - begin) / BLOCK * 1e6)
        wait()
    return min(blocks), statistics.median(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", default=",".join(FAMILIES), help="some of the default, with commas")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    measured = {}
    print(f"{'call':34s}{'us':>8s}{'median':>8s}")
    for family in options.families.split(","):
        for name, call in FAMILIES[family](options.device).items():
            measured[name] = measure(call, options.calls, options.device)
            print(f"{name:34s}{measured[name][0]:8.2f}{measured[name][1]:8.2f}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({name: {"us": low, "median": mid} for name, (low, mid) in measured.items()}, file, indent=1)


if __name__ == "__main__":
    main()
