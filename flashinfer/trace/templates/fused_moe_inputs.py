# SPDX-License-Identifier: Apache-2.0
"""Inputs of ``cutlass_fused_moe`` for each format of weights, scaled so that sums have a variance near one."""

from __future__ import annotations

import math
from typing import Any

import torch

from .shared import normal, randint, seeded

__all__ = [
    "cutlass_fused_moe_fp8_block_init",
    "cutlass_fused_moe_fp8_init",
    "cutlass_fused_moe_fp8_per_expert_init",
    "cutlass_fused_moe_init",
    "cutlass_fused_moe_int4_fp8_init",
    "cutlass_fused_moe_mxfp4_fp8_init",
    "cutlass_fused_moe_mxfp4_init",
]


def cutlass_fused_moe_init(
    *,
    seq_len: int,
    num_local_experts: int = 8,
    top_k: int = 2,
    hidden_size: int = 4096,
    fc1_rows: int = 28672,
    intermediate_size: int = 14336,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "input": normal(g, seq_len, hidden_size),
        "token_selected_experts": randint(g, num_local_experts, seq_len, top_k),
        "token_final_scales": torch.full((seq_len, top_k), 1.0 / top_k, device=device),
        "fc1_expert_weights": normal(g, num_local_experts, fc1_rows, hidden_size) / hidden_size**0.5,
        "fc2_expert_weights": normal(g, num_local_experts, hidden_size, intermediate_size) / intermediate_size**0.5,
        "output_dtype": torch.bfloat16,
        "quant_scales": [],
    }


def cutlass_fused_moe_fp8_init(
    *,
    seq_len: int,
    num_local_experts: int = 8,
    top_k: int = 2,
    hidden_size: int = 4096,
    fc1_rows: int = 28672,
    intermediate_size: int = 14336,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, fp8 = seeded(seed, device), torch.float8_e4m3fn
    fc1_dequant = torch.full((num_local_experts,), hidden_size**-0.5, device=device)
    fc2_dequant = torch.full((num_local_experts,), intermediate_size**-0.5 / 16, device=device)
    return {
        "input": normal(g, seq_len, hidden_size, dtype=fp8),
        "token_selected_experts": randint(g, num_local_experts, seq_len, top_k),
        "token_final_scales": torch.full((seq_len, top_k), 1.0 / top_k, device=device),
        "fc1_expert_weights": normal(g, num_local_experts, fc1_rows, hidden_size, dtype=fp8),
        "fc2_expert_weights": normal(g, num_local_experts, hidden_size, intermediate_size, dtype=fp8),
        "output_dtype": torch.bfloat16,
        "quant_scales": [
            fc1_dequant,
            torch.tensor(16.0, device=device),
            fc2_dequant,
            torch.tensor(1.0, device=device),
        ],
    }


def cutlass_fused_moe_fp8_per_expert_init(
    *,
    seq_len: int,
    num_local_experts: int = 8,
    top_k: int = 2,
    hidden_size: int = 4096,
    fc1_rows: int = 28672,
    intermediate_size: int = 14336,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    sizes = {"hidden_size": hidden_size, "fc1_rows": fc1_rows, "intermediate_size": intermediate_size}
    counts = {"seq_len": seq_len, "num_local_experts": num_local_experts, "top_k": top_k}
    made = cutlass_fused_moe_fp8_init(**counts, **sizes, device=device, seed=seed)
    fc1_dequant, _, fc2_dequant, unread = made["quant_scales"]
    quant = torch.linspace(8.0, 32.0, num_local_experts, device=device)
    return {**made, "quant_scales": [fc1_dequant, quant, fc2_dequant * 16 / quant, unread]}


def cutlass_fused_moe_fp8_block_init(
    *,
    seq_len: int,
    num_local_experts: int = 128,
    top_k: int = 8,
    hidden_size: int = 2048,
    fc1_rows: int = 1536,
    intermediate_size: int = 768,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, fp8 = seeded(seed, device), torch.float8_e4m3fn

    def scales(rows: int, columns: int) -> torch.Tensor:
        blocks = (num_local_experts, (rows + 127) // 128, (columns + 127) // 128)
        return (torch.rand(blocks, generator=g, device=device) + 0.5) * columns**-0.5

    return {
        "input": normal(g, seq_len, hidden_size),
        "token_selected_experts": randint(g, num_local_experts, seq_len, top_k),
        "token_final_scales": torch.full((seq_len, top_k), 1.0 / top_k, device=device),
        "fc1_expert_weights": normal(g, num_local_experts, fc1_rows, hidden_size, dtype=fp8),
        "fc2_expert_weights": normal(g, num_local_experts, hidden_size, intermediate_size, dtype=fp8),
        "output_dtype": torch.bfloat16,
        "quant_scales": [scales(fc1_rows, hidden_size), scales(hidden_size, intermediate_size)],
        "use_deepseek_fp8_block_scale": True,
    }


def w4_layer(
    g: torch.Generator,
    seq_len: int,
    num_local_experts: int,
    top_k: int,
    hidden_size: int,
    fc1_rows: int,
    packed_intermediate: int,
) -> dict[str, Any]:
    """Arguments that layers with four-bit weights share. Any bytes are weights, in whatever order they are."""

    def codes(*shape: int) -> torch.Tensor:
        return randint(g, 256, num_local_experts, *shape).to(torch.uint8)

    return {
        "input": normal(g, seq_len, hidden_size),
        "token_selected_experts": randint(g, num_local_experts, seq_len, top_k),
        "token_final_scales": torch.full((seq_len, top_k), 1.0 / top_k, device=g.device),
        "fc1_expert_weights": codes(fc1_rows, hidden_size // 2),
        "fc2_expert_weights": codes(hidden_size, packed_intermediate),
        "output_dtype": torch.bfloat16,
        "use_w4_group_scaling": True,
    }


def gpt_oss_arguments(g: torch.Generator, num_local_experts: int, hidden_size: int, fc1_rows: int) -> dict[str, Any]:
    """Small biases, and the constants of the activation, as GPT-OSS has them."""
    constants = {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0}
    return {
        "fc1_expert_biases": normal(g, num_local_experts, fc1_rows) / 4,
        "fc2_expert_biases": normal(g, num_local_experts, hidden_size) / 4,
        **{name: torch.full((num_local_experts,), x, device=g.device) for name, x in constants.items()},
    }


def folded_bytes(g: torch.Generator, experts: int, rows: int, columns: int, low: int, high: int) -> torch.Tensor:
    """Scales of ``[low, high)`` for 32 columns each, folded; in any order they are such scales."""
    return randint(g, high, experts, rows // 64, columns // 128, 16, 16, low=low).to(torch.uint8)


def cutlass_fused_moe_mxfp4_init(
    *,
    seq_len: int,
    num_local_experts: int = 128,
    top_k: int = 4,
    hidden_size: int = 2944,
    fc1_rows: int = 5888,
    packed_intermediate: int = 1472,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    layer = w4_layer(g, seq_len, num_local_experts, top_k, hidden_size, fc1_rows, packed_intermediate)

    def scales(rows: int, columns: int) -> torch.Tensor:
        # Codes are 2.9 and their scales 1.2 times 2^(middle - 127) in the square mean.
        middle = 127 - round(math.log2(3.5 * columns**0.5))
        return folded_bytes(g, num_local_experts, rows, columns, middle - 1, middle + 2)

    return {
        **layer,
        "quant_scales": [scales(fc1_rows, hidden_size), scales(hidden_size, 2 * packed_intermediate)],
        **gpt_oss_arguments(g, num_local_experts, hidden_size, fc1_rows),
    }


def cutlass_fused_moe_int4_fp8_init(
    *,
    seq_len: int,
    num_local_experts: int = 256,
    top_k: int = 8,
    hidden_size: int = 7168,
    fc1_rows: int = 512,
    packed_intermediate: int = 128,
    intermediate_size: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    layer = w4_layer(g, seq_len, num_local_experts, top_k, hidden_size, fc1_rows, packed_intermediate)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=g, device=device) * (high - low) + low

    def scales(rows: int, columns: int) -> torch.Tensor:
        # Codes are 4.6 in the square mean.
        each = uniform(0.5, 1.5, num_local_experts, rows // 64, columns // 128, 8, 8) / (4.8 * columns**0.5)
        return each.to(torch.bfloat16)

    acts = [(8 * uniform(0.5, 1.0, columns)).to(torch.bfloat16) for columns in (hidden_size, 2 * packed_intermediate)]
    nothing = torch.empty(0, dtype=torch.bfloat16, device=device)
    alphas = [uniform(0.125, 0.25, num_local_experts) for _ in range(2)]
    folded = [scales(fc1_rows, hidden_size), scales(hidden_size, 2 * packed_intermediate)]
    return {**layer, "quant_scales": [*folded, *acts, nothing, nothing, *alphas], "use_packed_weights": True}


def cutlass_fused_moe_mxfp4_fp8_init(
    *,
    seq_len: int,
    num_local_experts: int = 128,
    top_k: int = 4,
    hidden_size: int = 2944,
    fc1_rows: int = 5888,
    packed_intermediate: int = 1472,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    layer = w4_layer(g, seq_len, num_local_experts, top_k, hidden_size, fc1_rows, packed_intermediate)

    def scales(rows: int, columns: int) -> list[torch.Tensor]:
        # Codes are 2.9 and 2^(1 to 12 - 6) are 21 in the square mean.
        offsets = folded_bytes(g, num_local_experts, rows, columns, 1, 13).view(torch.int32)
        exponents = randint(g, 2, num_local_experts) - 1 - round(math.log2(62 * columns**0.5))
        return [offsets, torch.exp2(exponents.float())]

    fc1, fc2 = scales(fc1_rows, hidden_size), scales(hidden_size, 2 * packed_intermediate)
    return {
        **layer,
        "quant_scales": [*fc1, torch.ones((), device=device), *fc2],
        **gpt_oss_arguments(g, num_local_experts, hidden_size, fc1_rows),
        "use_wfp4afp8_humming": True,
    }
