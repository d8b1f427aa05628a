# SPDX-License-Identifier: Apache-2.0
"""Layers of experts for tests: arguments of ``cutlass_fused_moe`` in each format, and what they must give."""

from __future__ import annotations

from typing import Any, Optional

import torch

from flashinfer.fused_moe import (
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
    preprocess_moe_weights_for_sm90_mixed_gemm_humming,
)
from flashinfer.trace.templates.fused_moe_reference import fold_experts
from flashinfer.trace.templates.gemm_blocks import spread_scales, to_e4m3_blocks
from flashinfer.trace.templates.shared import to_fp8

E4M3, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def routed(tokens: int, top_k: int, experts: int, device: str) -> dict[str, torch.Tensor]:
    """Return ids, some of them twice in a row, and scales."""
    return {
        "token_selected_experts": torch.randint(0, experts, (tokens, top_k), device=device).to(torch.int32),
        "token_final_scales": torch.rand(tokens, top_k, device=device),
    }


def dense(
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    device: str,
    dtype: torch.dtype = BF16,
    is_gated: bool = True,
    total: Optional[int] = None,
) -> dict[str, Any]:
    """Return a call with 16-bit weights; ``total`` is the number of experts of all ranks."""
    rows = 2 * inner if is_gated else inner
    return {
        "input": torch.randn(tokens, hidden, device=device).to(dtype),
        **routed(tokens, top_k, total or experts, device),
        "fc1_expert_weights": (torch.randn(experts, rows, hidden, device=device) / hidden**0.5).to(dtype),
        "fc2_expert_weights": (torch.randn(experts, hidden, inner, device=device) / inner**0.5).to(dtype),
        "output_dtype": dtype,
        "quant_scales": [],
    }


def fp8(*sizes: int, device: str, per_expert: bool) -> dict[str, Any]:
    """Return a call with e4m3 tokens and weights; the scale of the hidden values is one, or one per expert."""
    call = dense(*sizes, device)
    experts = sizes[3]
    call["input"] = to_fp8(call["input"].float() * 16, E4M3)
    for name in ("fc1_expert_weights", "fc2_expert_weights"):
        call[name] = to_fp8(call[name].float() * 64, E4M3)
    dequant1 = (torch.rand(experts, device=device) + 0.5) / 1024
    dequant2 = (torch.rand(experts, device=device) + 0.5) / 2048
    quant2 = torch.rand(experts, device=device) * 32 + 16 if per_expert else torch.tensor(32.0, device=device)
    call["quant_scales"] = [dequant1, quant2, dequant2, torch.tensor(1.0 / 16, device=device)]
    return call


def fp8_block(*sizes: int, device: str) -> dict[str, Any]:
    """Return a call with e4m3 weights and scales of 128 x 128 blocks."""
    call = dense(*sizes, device)
    call["quant_scales"] = []
    for name in ("fc1_expert_weights", "fc2_expert_weights"):
        weights = call[name]
        n, k = weights.shape[1:]
        padded = torch.zeros(weights.shape[0], n, (k + 127) // 128 * 128, device=device)
        padded[:, :, :k] = weights
        pairs = [to_e4m3_blocks(x, 128) for x in padded]
        call[name] = torch.stack([codes[:, :k] for codes, _ in pairs]).contiguous()
        call["quant_scales"].append(torch.stack([scale for _, scale in pairs]))
    return {**call, "use_deepseek_fp8_block_scale": True}


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of packed e2m1 codes, the even element in the low nibble."""
    table = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], device=codes.device)
    return torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), dim=-1).flatten(-2)


def decode_int4(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of packed two's complement int4 codes."""
    both = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).float()
    return torch.where(both < 8, both, both - 16)


def packed(experts: int, n: int, k: int, device: str) -> torch.Tensor:
    return torch.randint(0, 256, (experts, n, k // 2), device=device).to(torch.uint8)


def mxfp4(
    tokens: int, hidden: int, inner: int, experts: int, top_k: int, device: str, span: int = 4
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a call with random MXFP4 weights, whose exponents differ by up to ``span``, and float32 weights."""
    call = dense(tokens, hidden, inner, experts, top_k, device)
    values = {}
    call["quant_scales"] = []
    for name, (n, k) in {"fc1": (2 * inner, hidden), "fc2": (hidden, inner)}.items():
        codes = packed(experts, n, k, device)
        scale = torch.randint(120 - span, 121, (experts, n, k // 32), device=device).to(torch.uint8)
        values[name] = decode_e2m1(codes) * torch.exp2(scale.float() - 127).repeat_interleave(32, dim=-1)
        values[f"{name}_codes"], values[f"{name}_scale"] = codes, scale
        call[f"{name}_expert_weights"] = interleave_moe_weights_for_sm90_mixed_gemm(codes, "fp4")
        call["quant_scales"].append(interleave_moe_scales_for_sm90_mixed_gemm(scale))
    return {**call, "use_w4_group_scaling": True}, values


def mxfp4_fp8(*sizes: int, device: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a call with MXFP4 weights rewritten for e4m3 activations, and the float32 weights they stand for."""
    call, values = mxfp4(*sizes, device=device)
    scales = []
    for name in ("fc1", "fc2"):
        codes, raw = values[f"{name}_codes"], values[f"{name}_scale"]
        weight, offset, residual = preprocess_moe_weights_for_sm90_mixed_gemm_humming(codes, raw)
        call[f"{name}_expert_weights"] = weight
        scales.append((offset.view(torch.int32), residual * 64))
    call["quant_scales"] = [*scales[0], torch.ones((), device=device), *scales[1]]
    return {**call, "use_wfp4afp8_humming": True}, values


def int4_fp8(*sizes: int, device: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a call with int4 weights in groups of 128 and e4m3 activations, and float32 weights and factors."""
    tokens, hidden, inner, experts, top_k = sizes
    call = dense(tokens, hidden, inner, experts, top_k, device)
    values = {}
    scales = []
    for name, (n, k) in {"fc1": (2 * inner, hidden), "fc2": (hidden, inner)}.items():
        codes = packed(experts, n, k, device)
        scale = (torch.rand(experts, n, k // 128, device=device) / 32).to(BF16)
        alpha = torch.rand(experts, device=device) + 0.5
        factor = (torch.rand(k, device=device) + 0.5).to(BF16)
        weights = decode_int4(codes) * scale.float().repeat_interleave(128, dim=-1)
        values[name] = weights * alpha.view(-1, 1, 1)
        values[f"{name}_factor"] = factor.float()
        call[f"{name}_expert_weights"] = interleave_moe_weights_for_sm90_mixed_gemm(codes, "int4")
        scales.append((interleave_moe_scales_for_sm90_mixed_gemm(scale, 128), factor, alpha))
    nothing = torch.empty(0, dtype=BF16, device=device)
    (s1, a1, alpha1), (s2, a2, alpha2) = scales
    call["quant_scales"] = [s1, s2, a1, a2, nothing, nothing, alpha1, alpha2]
    return {**call, "use_w4_group_scaling": True, "use_packed_weights": True}, values


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare: codes of hidden values may fall to a neighbour, an eighth away, where sums differ in the last bit."""
    assert out.dtype == expected.dtype and out.isfinite().all()
    error = (out.float() - expected.float()).abs()
    size = expected.float().abs().mean()
    assert error.mean() < 0.01 * size and error.max() < 0.25 * size + 0.02 * expected.float().abs().max()


def spread_of_codes(call: dict[str, Any]) -> torch.Tensor:
    """Return, for each result of an ``fp8_block`` call, the root of the sum of squares of the terms that it sums.

    Tensor cores keep 13 bits of the sums of GEMM 1, so that some hidden values are quantised to a neighbouring code,
    at most an eighth away. A result that is one large term moves by as much, one of many small terms hardly moves.
    """

    def weights(name: str, scales: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.float() * spread_scales(s, *x.shape) for x, s in zip(call[name], scales, strict=True)])

    scales1, scales2 = call["quant_scales"]
    # Slots of a token with one expert have the same hidden values, which move together: they are one term.
    experts, scales = call["token_selected_experts"], call["token_final_scales"]
    is_same = experts.unsqueeze(2) == experts.unsqueeze(1)
    is_first = is_same.int().argmax(dim=2) == torch.arange(experts.shape[1], device=experts.device)
    return fold_experts(
        call["input"].float(),
        experts,
        ((is_same * scales.unsqueeze(1)).sum(dim=2) * is_first) ** 2,
        weights("fc1_expert_weights", scales1),
        weights("fc2_expert_weights", scales2) ** 2,
        round_hidden=lambda h, expert: h**2,
    ).sqrt()


def close_codes(out: torch.Tensor, expected: torch.Tensor, spread: torch.Tensor) -> None:
    """Compare results of an ``fp8_block`` call: one by one, the move of up to two equal terms, and rounding to bf16.

    Where the largest of 128 hidden values moves by a bit of bf16, their scale does, and all of their codes are rounded
    anew. A call in which every scale moved would differ by 0.03 of the spread on average.
    """
    assert out.dtype == expected.dtype and out.isfinite().all()
    error, size = (out.float() - expected.float()).abs(), expected.float().abs()
    assert error.mean() < 0.02 * spread.mean() and (error <= 0.1875 * spread + 0.01 * size).all()


def by_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the values of rows quantised to e4m3 with q = 448 / amax."""
    amax = x.float().abs().amax(dim=-1, keepdim=True)
    q = torch.where(amax == 0, 1.0, torch.full_like(amax, 448.0) / amax)
    return to_fp8(x.float() * q, E4M3).float() / q


def folded(call: dict[str, Any], fc1: torch.Tensor, fc2: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Return the reference of a call with float32 weights in place of the packed ones."""
    x = arguments.pop("x", call["input"].float())
    routing = (call["token_selected_experts"], call["token_final_scales"])
    return fold_experts(x, *routing, fc1, fc2, **arguments).to(call["output_dtype"])


#: Places of a layer that may hold NaN or infinity. Weights of four bits cannot: their rows have biases.
PLACES = ("token", "up", "gate", "up bias", "gate bias", "down", "down bias", "final scale")


def biased(call: dict[str, Any], inner: int) -> dict[str, Any]:
    """Return a call with biases of both products."""
    x, experts = call["input"], call["fc1_expert_weights"].shape[0]
    sizes = {"fc1_expert_biases": 2 * inner, "fc2_expert_biases": x.shape[1]}
    return {**call, **{name: torch.randn(experts, n, device=x.device).to(BF16) for name, n in sizes.items()}}


def poisoned(call: dict[str, Any], place: str, value: float = torch.nan, first: int = 0) -> tuple[dict, torch.Tensor]:
    """Return a copy with ``value`` in one number that belongs to the expert of the first pair, and which results depend
    on that number. ``first``: the expert of the first weights.
    """
    ids, tokens = call["token_selected_experts"], call["input"]
    expert = int(ids[0, 0]) - first
    of_token = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
    of_token[0] = True
    of_expert = (ids == expert + first).any(dim=1, keepdim=True).expand_as(of_token)
    of_row = of_expert & (torch.arange(tokens.shape[1], device=tokens.device) == 5)
    gate = call["fc1_expert_biases"].shape[1] // 2 + 1
    name, index, mask = {
        "token": ("input", (0, 3), of_token),
        "up": ("fc1_expert_weights", (expert, 1, 2), of_expert),
        "gate": ("fc1_expert_weights", (expert, gate, 2), of_expert),
        "up bias": ("fc1_expert_biases", (expert, 1), of_expert),
        "gate bias": ("fc1_expert_biases", (expert, gate), of_expert),
        "down": ("fc2_expert_weights", (expert, 5, 1), of_row),
        "down bias": ("fc2_expert_biases", (expert, 5), of_row),
        "final scale": ("token_final_scales", (0, 0), of_token),
    }[place]
    changed = call[name].clone()
    changed[index] = value
    return {**call, name: changed}, mask
