# SPDX-License-Identifier: Apache-2.0
"""References of the cases: plain torch in float64, written from the formulas."""

from __future__ import annotations

from typing import Callable, Optional

import torch

F64 = torch.float64
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], dtype=F64)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    normalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Run one request token by token: outputs, the last state and the state after each token.

    q and k by token, head and K; v by token, value head and V; the state is by value head, V and K.
    """
    q, k, v, decay, beta, state = (x.to(F64) for x in (q, k, v, decay, beta, state))
    if normalize:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    group = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(group, dim=1) * q.shape[-1] ** -0.5, k.repeat_interleave(group, dim=1)
    out, states = [], []
    for t in range(len(q)):
        state = state * decay[t, :, None, None]
        error = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
        state = state + torch.einsum("h,hv,hk->hvk", beta[t], error, k[t])
        out.append(torch.einsum("hvk,hk->hv", state, q[t]))
        states.append(state)
    return torch.stack(out), state, states


def mixture(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    middle: Optional[Callable[[torch.Tensor], torch.Tensor]] = None,
    bias: Optional[tuple[torch.Tensor, torch.Tensor]] = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float = float("inf"),
) -> torch.Tensor:
    """Mixture of SwiGLU experts; rows of ``w1`` are the up half, then the gate half, as the engines order them."""
    out = torch.zeros(len(x), w2.shape[1], dtype=F64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].long(), strict=True):
            both = x[token].to(F64) @ w1[expert].to(F64).T
            both = both + bias[0][expert].to(F64) if bias else both
            up, gate = both.chunk(2)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            row = gate * torch.sigmoid(alpha * gate) * (up + beta)
            row = (middle(row) if middle else row) @ w2[expert].to(F64).T
            out[token] += weight.to(F64) * (row + bias[1][expert].to(F64) if bias else row)
    return out


def random_mxfp4(experts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random packed e2m1 pairs and their exponents, one for 32 columns."""
    packed = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8)
    return packed, torch.randint(121, 125, (experts, rows, columns // 32), dtype=torch.uint8)


def dequantize_mxfp4(packed: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return the values of packed pairs (low half first), times powers of two."""
    pairs = torch.stack([E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]], dim=-1).flatten(-2)
    return pairs * torch.exp2(exponents.to(F64) - 127).repeat_interleave(32, dim=-1)


def counts_agree(tokens: torch.Tensor, expected: torch.Tensor, draws: int) -> None:
    """Check that counts of drawn tokens stay within five standard deviations of a distribution, and in its support."""
    counts = torch.bincount(tokens.long(), minlength=len(expected))
    assert not counts[expected == 0].any(), "a token outside of the filter was drawn"
    spread = 5 * (draws * expected * (1 - expected)).sqrt() + 1
    assert ((counts - draws * expected).abs() <= spread).all(), (counts.tolist(), (draws * expected).tolist())


def run_linear(linear: Callable[..., torch.Tensor], counts: tuple[int, ...]) -> None:
    """Compare ``linear(x, weight, scales of blocks)`` with float64."""
    torch.manual_seed(0)
    weight = (torch.randn(256, 384) * 8).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3) / 100 + 0.01
    plain = weight.to(F64) * scale.repeat_interleave(128, 0).repeat_interleave(128, 1).to(F64)
    for rows in counts:
        x = torch.randn(rows, 384).bfloat16()
        wanted = x.to(F64) @ plain.T
        error = (linear(x, weight, scale).to(F64) - wanted).norm() / wanted.norm()
        assert error < 0.04, (rows, float(error))  # rows of e4m3 account for 0.026
