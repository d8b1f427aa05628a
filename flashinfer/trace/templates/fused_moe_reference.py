# SPDX-License-Identifier: Apache-2.0
"""A layer of experts in plain torch, for the references of ``flashinfer.fused_moe``: float32, expert by expert."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F

__all__ = ["activate", "fold_experts"]


def activate(
    z: torch.Tensor,
    activation_type: int,
    expert: int,
    swiglu_alpha: Optional[torch.Tensor] = None,
    swiglu_beta: Optional[torch.Tensor] = None,
    swiglu_limit: Optional[torch.Tensor] = None,
    situ_beta: Optional[torch.Tensor] = None,
    situ_linear_beta: Optional[torch.Tensor] = None,
    **_: Any,
) -> torch.Tensor:
    """Activation of rows of an expert. Gated ones (3, 4, 5, 7, 8, 10) read [up ; gate]."""

    def constant(values: Optional[torch.Tensor], default: float) -> float:
        return default if values is None else float(values[expert])

    if activation_type == 3 and not (swiglu_alpha is None and swiglu_beta is None and swiglu_limit is None):
        activation_type = 5
    if activation_type not in (3, 4, 5, 7, 8, 10):
        if activation_type in (1, 6):
            return F.relu(z) if activation_type == 1 else F.relu(z).square()
        return F.gelu(z) if activation_type == 0 else (F.silu(z) if activation_type == 2 else z)
    up, gate = z.chunk(2, dim=-1)
    if activation_type == 5:
        alpha, beta = constant(swiglu_alpha, 1.0), constant(swiglu_beta, 0.0)
        limit = constant(swiglu_limit, float("inf"))
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + beta)
    if activation_type == 7:
        limit = constant(swiglu_limit, 7.0)
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if activation_type == 10:
        b, linear = constant(situ_beta, 4.0), constant(situ_linear_beta, 25.0)
        return b * torch.tanh(gate / b) * torch.sigmoid(gate) * linear * torch.tanh(up / linear)
    if activation_type == 3:
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation_type == 8 else "none") * up


def fold_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    scales: Optional[torch.Tensor],
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    *,
    fc1_expert_biases: Optional[torch.Tensor] = None,
    fc2_expert_biases: Optional[torch.Tensor] = None,
    tp_rank: int = 0,
    ep_rank: int = 0,
    activation_type: int = 3,
    round_sums: Callable[[torch.Tensor], torch.Tensor] = lambda z: z,
    round_hidden: Callable[[torch.Tensor, int], torch.Tensor] = lambda h, expert: h,
    **constants: Any,
) -> torch.Tensor:
    """Sum over the experts of each token: scale * fc2(act(fc1(x))), with weights and tokens as float32.

    Keywords are those of ``cutlass_fused_moe``, so that references pass on what they do not use themselves.
    """
    out = torch.zeros(x.shape[0], fc2.shape[1], device=x.device)
    for e in range(fc1.shape[0]):
        token, slot = torch.where(experts == ep_rank * fc1.shape[0] + e)
        if token.numel() == 0:
            continue
        z = round_sums(x[token] @ fc1[e].T)
        if fc1_expert_biases is not None:
            z = z + fc1_expert_biases[e].float()
        y = round_hidden(activate(z, int(activation_type), e, **constants), e) @ fc2[e].T
        if fc2_expert_biases is not None and tp_rank == 0:
            y = y + fc2_expert_biases[e].float()
        out.index_add_(0, token, y if scales is None else y * scales[token, slot, None])
    return out
