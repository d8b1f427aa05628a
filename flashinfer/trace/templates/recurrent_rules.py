# SPDX-License-Identifier: Apache-2.0
"""References of the recurrent rules: token by token, in float64. The source travels with each definition."""

from __future__ import annotations

from typing import Optional

import torch

__all__ = ["delta_rule", "gdn_gates", "l2_normalized", "softplus"]


def l2_normalized(x: torch.Tensor) -> torch.Tensor:
    """x / |x| over the last dimension, with 1e-6 below the root."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def softplus(x: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    return torch.where(x * beta <= threshold, torch.log1p(torch.exp((x * beta).clamp(max=threshold))) / beta, x)


def gdn_gates(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log decay and beta of the gated delta rule from the projections, ``(..., HV)``."""
    x = a.double() + dt_bias.double()
    return -A_log.double().exp() * softplus(x, softplus_beta, softplus_threshold), torch.sigmoid(b.double())


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: Optional[float] = None,
    normalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the delta rule to ``(B, T, heads, dim)`` from states ``(B, HV, V, K)``.

    ``log_decay`` is ``(B, T, HV)``, or ``(B, T, HV, K)`` with one decay per key channel. Return the outputs
    ``(B, T, HV, V)`` and the states after each token, ``(B, T, HV, V, K)``, in float64.
    """
    q, k, v, s = q.double(), k.double(), v.double(), state.double()
    if normalize:
        q, k = l2_normalized(q), l2_normalized(k)
    repeats = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(repeats, dim=2), k.repeat_interleave(repeats, dim=2)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    decay = log_decay.double().exp()
    decay = decay[..., None, None] if decay.ndim == 3 else decay[..., None, :]
    outputs, states = [], []
    for t in range(q.shape[1]):
        s = s * decay[:, t]
        u = beta[:, t, :, None].double() * (v[:, t] - (s @ k[:, t, :, :, None])[..., 0])
        s = s + u[..., None] * k[:, t, :, None, :]
        outputs.append((s @ q[:, t, :, :, None])[..., 0])
        states.append(s)
    if not outputs:
        return torch.zeros_like(v), s.new_zeros(s.shape[0], 0, *s.shape[1:])
    return torch.stack(outputs, 1), torch.stack(states, 1)
