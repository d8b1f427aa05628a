# SPDX-License-Identifier: Apache-2.0
"""A small layer for tests of MoELayer: its configuration, its weights, packs of tokens."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer.fused_moe import (
    BackendOptions,
    CutlassBf16Config,
    ExpertConfig,
    MoEActivationPack,
    MoEConfig,
    MoEWeightPack,
    QuantConfig,
    RoutingConfig,
)

EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 128, 128
BF16_BACKEND = BackendOptions((CutlassBf16Config(),))
SIZES = {"num_local_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INNER}


def config(**changes: Any) -> MoEConfig:
    fields = {"routing": RoutingConfig(EXPERTS, TOP_K), "quant": QuantConfig(), "experts": ExpertConfig(INNER)}
    return MoEConfig(**{**fields, "backend": BF16_BACKEND, **changes})


def weights_of(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    w1 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, device=device) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, device=device) / INNER**0.5
    return w1.bfloat16(), w2.bfloat16()


def pack_of(device: str, tokens: int = 5) -> MoEActivationPack:
    ids = torch.randint(0, EXPERTS, (tokens, TOP_K), dtype=torch.int32, device=device)
    x = torch.randn(tokens, HIDDEN, device=device).bfloat16()
    return MoEActivationPack(x, None, ids, torch.rand(tokens, TOP_K, device=device))


def bf16_weights(device: str) -> tuple[MoEWeightPack, torch.Tensor, torch.Tensor]:
    w1, w2 = weights_of(device)
    weights = MoEWeightPack()
    weights.prepare_for("cutlass_bf16", CutlassBf16Config.prepare_weights(w1, w2, **SIZES))
    return weights, w1, w2
