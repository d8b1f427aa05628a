# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of ``flashinfer.fused_moe``: few tokens are bound by the weights they touch, many by the products.

python benchmarks/bench_fused_moe.py [-k fp8_block] [--device cpu] [--json FILE]
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from harness import Bench, bf16, case, empty, main, nbytes, rand

from flashinfer.fused_moe import cutlass_fused_moe, interleave_moe_weights_for_sm90_mixed_gemm
from flashinfer.testing import Tolerance
from flashinfer.trace.templates.fused_moe import cutlass_fused_moe_trace
from flashinfer.trace.templates.fused_moe_inputs import (
    cutlass_fused_moe_fp8_init,
    cutlass_fused_moe_int4_fp8_init,
    cutlass_fused_moe_mxfp4_fp8_init,
)

# Experts, experts per token, hidden and intermediate size.
MIXTRAL = {"experts": 8, "top_k": 2, "hidden": 4096, "inner": 14336}
QWEN3 = {"experts": 128, "top_k": 8, "hidden": 2048, "inner": 768}
DEEPSEEK_TP8 = {"experts": 256, "top_k": 8, "hidden": 7168, "inner": 256}
LLAMA4 = {"experts": 16, "top_k": 1, "hidden": 5120, "inner": 8192}
GPT_OSS = {"experts": 128, "top_k": 4, "hidden": 2944, "inner": 2944}  # 2880, padded to a multiple of 128
SMALL = {"experts": 8, "top_k": 2, "hidden": 512, "inner": 768}
# Sums in another order; the hidden values are rounded before the second product.
SUMS = Tolerance(rtol=2**-6, atol=3e-2)
# A hidden value near the middle of two codes may fall to either side, an eighth away.
CODES = Tolerance(rtol=0.1, atol=0.1)


def _points(sizes: dict[str, int], *tokens: int) -> list[dict[str, int]]:
    return [{"tokens": count, **sizes} for count in tokens]


def _touched(ids: torch.Tensor) -> int:
    return int(ids.unique().numel())


def _bench(call: dict[str, Any], reference: Any, flops: int, tolerance: Tolerance) -> Bench:
    ids, fc1, fc2 = (call[name] for name in ("token_selected_experts", "fc1_expert_weights", "fc2_expert_weights"))
    out = empty(*call["input"].shape, bf16)
    weights = nbytes(fc1, fc2) * _touched(ids) // fc1.shape[0]
    return Bench(
        run={"cutlass_fused_moe": lambda x, out: cutlass_fused_moe(**{**call, "input": x}, output=out)[0]},
        args=(call["input"], out),
        reference=reference,
        bytes=weights + nbytes(call["input"], out),
        flops=flops,
        tolerance=tolerance,
    )


def _routing(tokens: int, top_k: int, experts: int) -> dict[str, torch.Tensor]:
    scores = rand(tokens, experts, torch.float32)
    weights, ids = scores.topk(top_k, dim=1)
    return {"token_selected_experts": ids.to(torch.int32), "token_final_scales": weights.softmax(dim=1)}


@case(
    "cutlass_fused_moe",
    cpu=_points(SMALL, 1, 32),
    cuda=_points(MIXTRAL, 1, 16, 4096) + _points(QWEN3, 1, 64, 8192),
)
def dense(tokens: int, experts: int, top_k: int, hidden: int, inner: int) -> Bench:
    call = {
        "input": rand(tokens, hidden, bf16),
        **_routing(tokens, top_k, experts),
        "fc1_expert_weights": rand(experts, 2 * inner, hidden, bf16) * hidden**-0.5,
        "fc2_expert_weights": rand(experts, hidden, inner, bf16) * inner**-0.5,
        "output_dtype": bf16,
        "quant_scales": [],
    }
    reference = lambda x, out: cutlass_fused_moe_trace.reference(**{**call, "input": x})  # noqa: E731
    return _bench(call, reference, 6 * tokens * top_k * hidden * inner, SUMS)


@case(
    "cutlass_fused_moe_fp8_block",
    cpu=_points(SMALL, 1, 32),
    cuda=_points(DEEPSEEK_TP8, 1, 16, 4096) + _points(QWEN3, 64, 8192),
)
def fp8_block(tokens: int, experts: int, top_k: int, hidden: int, inner: int) -> Bench:
    """Weights are small codes with scales of one half, so that no quantiser runs before the measurement."""
    scales = [
        torch.full((experts, -(-n // 128), -(-k // 128)), 0.5 * k**-0.5, device=out.device)
        for out in [empty(1, bf16)]
        for n, k in ((2 * inner, hidden), (hidden, inner))
    ]
    call = {
        "input": rand(tokens, hidden, bf16),
        **_routing(tokens, top_k, experts),
        "fc1_expert_weights": rand(experts, 2 * inner, hidden, bf16).to(torch.float8_e4m3fn),
        "fc2_expert_weights": rand(experts, hidden, inner, bf16).to(torch.float8_e4m3fn),
        "output_dtype": bf16,
        "quant_scales": scales,
        "use_deepseek_fp8_block_scale": True,
    }
    template = cutlass_fused_moe_trace(**call)
    named = dict(zip(("fc1_scale", "fc2_scale"), scales, strict=True))
    reference = lambda x, out: template.reference(**{**call, "input": x}, **named)  # noqa: E731
    return _bench(call, reference, 6 * tokens * top_k * hidden * inner, CODES)


def _traced(init: Callable[..., dict[str, Any]], tolerance: Tolerance, counts: dict[str, int], **sizes: int) -> Bench:
    """Make a layer by the inputs of its definition, whose reference checks it, with experts that a router chose."""
    device = str(empty(1, bf16).device)
    call = init(
        seq_len=counts["tokens"], num_local_experts=counts["experts"], top_k=counts["top_k"], device=device, **sizes
    )
    call |= _routing(counts["tokens"], counts["top_k"], counts["experts"])
    template = cutlass_fused_moe_trace(**call)
    scales = {name: x.tuple_idx for name, x in template.inputs.items() if getattr(x, "param", None) == "quant_scales"}
    named = {name: call["quant_scales"][index] for name, index in scales.items() if index is not None}
    reference = lambda x, out: template.reference(**{**call, "input": x}, **named)  # noqa: E731
    per_token = 6 * counts["top_k"] * counts["hidden"] * counts["inner"]
    return _bench(call, reference, per_token * counts["tokens"], tolerance)


@case(
    "cutlass_fused_moe_fp8",
    cpu=_points(SMALL, 1, 32),
    cuda=_points(LLAMA4, 1, 4, 16, 64) + _points(MIXTRAL, 1, 4, 16, 64, 4096),
)
def fp8(**counts: int) -> Bench:
    """e4m3 tokens and weights, a factor per expert."""
    hidden, inner = counts["hidden"], counts["inner"]
    sizes = {"hidden_size": hidden, "fc1_rows": 2 * inner, "intermediate_size": inner}
    return _traced(cutlass_fused_moe_fp8_init, CODES, counts, **sizes)


def _w4_sizes(counts: dict[str, int]) -> dict[str, int]:
    hidden, inner = counts["hidden"], counts["inner"]
    return {"hidden_size": hidden, "fc1_rows": 2 * inner, "packed_intermediate": inner // 2}


@case("cutlass_fused_moe_int4_fp8", cpu=_points(SMALL, 1, 32), cuda=_points(DEEPSEEK_TP8, 1, 16, 256, 4096))
def int4_fp8(**counts: int) -> Bench:
    return _traced(cutlass_fused_moe_int4_fp8_init, CODES, counts, **_w4_sizes(counts))


@case("cutlass_fused_moe_mxfp4_fp8", cpu=_points(SMALL, 1, 32), cuda=_points(GPT_OSS, 1, 16, 64, 256, 1024, 4096))
def mxfp4_fp8(**counts: int) -> Bench:
    return _traced(cutlass_fused_moe_mxfp4_fp8_init, CODES, counts, **_w4_sizes(counts))


def _decoded(codes: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return packed e2m1 codes times a power of two, as bf16."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
    table = (torch.cat((magnitudes, -magnitudes)) * 2.0**exponent).to(bf16)
    return table[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).int()]


@case(
    "cutlass_fused_moe_mxfp4",
    cpu=_points(SMALL, 1, 32),
    cuda=_points(GPT_OSS, 1, 16, 64, 256, 1024, 4096, 16384),
)
def mxfp4(tokens: int, experts: int, top_k: int, hidden: int, inner: int) -> Bench:
    """The layer of GPT-OSS: biases, and constants of the activation. All scales are 2^-7."""
    device = empty(1, bf16).device
    shapes = ((2 * inner, hidden), (hidden, inner))
    codes = [torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=device) for n, k in shapes]
    weights = [interleave_moe_weights_for_sm90_mixed_gemm(x) for x in codes]
    scales = [
        torch.full((experts, n // 64, k // 128, 16, 16), 120, dtype=torch.uint8, device=device) for n, k in shapes
    ]
    constants = {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0}
    call = {
        "input": rand(tokens, hidden, bf16),
        **_routing(tokens, top_k, experts),
        "fc1_expert_weights": weights[0],
        "fc2_expert_weights": weights[1],
        "fc1_expert_biases": rand(experts, 2 * inner, bf16),
        "fc2_expert_biases": rand(experts, hidden, bf16),
        "output_dtype": bf16,
        "quant_scales": scales,
        "use_w4_group_scaling": True,
        **{name: torch.full((experts,), x, device=device) for name, x in constants.items()},
    }

    def reference(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        fc1, fc2 = (_decoded(x, -7) for x in codes)
        same = {**call, "input": x, "quant_scales": [], "use_w4_group_scaling": False}
        return cutlass_fused_moe_trace.reference(**{**same, "fc1_expert_weights": fc1, "fc2_expert_weights": fc2})

    bench = _bench(call, reference, 6 * tokens * top_k * hidden * inner, SUMS)
    bench.bytes += nbytes(*scales) * _touched(call["token_selected_experts"]) // experts
    return bench


if __name__ == "__main__":
    main()
