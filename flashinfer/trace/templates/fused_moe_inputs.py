# SPDX-License-Identifier: Apache-2.0
"""Inputs of ``cutlass_fused_moe`` for each format of weights, scaled so that sums have a variance near one."""

from __future__ import annotations

from typing import Any

import torch

from .shared import normal, randint, seeded

__all__ = ["cutlass_fused_moe_fp8_block_init", "cutlass_fused_moe_fp8_init", "cutlass_fused_moe_init"]


def cutlass_fused_moe_init(
    *,
    num_tokens: int,
    num_experts: int = 8,
    top_k: int = 2,
    hidden_size: int = 4096,
    fc1_rows: int = 28672,
    intermediate_size: int = 14336,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "input": normal(g, num_tokens, hidden_size),
        "token_selected_experts": randint(g, num_experts, num_tokens, top_k),
        "token_final_scales": torch.full((num_tokens, top_k), 1.0 / top_k, device=device),
        "fc1_expert_weights": normal(g, num_experts, fc1_rows, hidden_size) / hidden_size**0.5,
        "fc2_expert_weights": normal(g, num_experts, hidden_size, intermediate_size) / intermediate_size**0.5,
        "output_dtype": torch.bfloat16,
        "quant_scales": [],
    }


def cutlass_fused_moe_fp8_init(
    *,
    num_tokens: int,
    num_experts: int = 8,
    top_k: int = 2,
    hidden_size: int = 4096,
    fc1_rows: int = 28672,
    intermediate_size: int = 14336,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, fp8 = seeded(seed, device), torch.float8_e4m3fn
    fc1_dequant = torch.full((num_experts,), hidden_size**-0.5, device=device)
    fc2_dequant = torch.full((num_experts,), intermediate_size**-0.5 / 16, device=device)
    return {
        "input": normal(g, num_tokens, hidden_size, dtype=fp8),
        "token_selected_experts": randint(g, num_experts, num_tokens, top_k),
        "token_final_scales": torch.full((num_tokens, top_k), 1.0 / top_k, device=device),
        "fc1_expert_weights": normal(g, num_experts, fc1_rows, hidden_size, dtype=fp8),
        "fc2_expert_weights": normal(g, num_experts, hidden_size, intermediate_size, dtype=fp8),
        "output_dtype": torch.bfloat16,
        "quant_scales": [
            fc1_dequant,
            torch.tensor(16.0, device=device),
            fc2_dequant,
            torch.tensor(1.0, device=device),
        ],
    }


def cutlass_fused_moe_fp8_block_init(
    *,
    num_tokens: int,
    num_experts: int = 128,
    top_k: int = 8,
    hidden_size: int = 2048,
    fc1_rows: int = 1536,
    intermediate_size: int = 768,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, fp8 = seeded(seed, device), torch.float8_e4m3fn

    def scales(rows: int, columns: int) -> torch.Tensor:
        blocks = (num_experts, (rows + 127) // 128, (columns + 127) // 128)
        return (torch.rand(blocks, generator=g, device=device) + 0.5) * columns**-0.5

    return {
        "input": normal(g, num_tokens, hidden_size),
        "token_selected_experts": randint(g, num_experts, num_tokens, top_k),
        "token_final_scales": torch.full((num_tokens, top_k), 1.0 / top_k, device=device),
        "fc1_expert_weights": normal(g, num_experts, fc1_rows, hidden_size, dtype=fp8),
        "fc2_expert_weights": normal(g, num_experts, hidden_size, intermediate_size, dtype=fp8),
        "output_dtype": torch.bfloat16,
        "quant_scales": [scales(fc1_rows, hidden_size), scales(hidden_size, intermediate_size)],
        "use_deepseek_fp8_block_scale": True,
    }
