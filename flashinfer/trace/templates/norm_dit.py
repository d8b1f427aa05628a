# SPDX-License-Identifier: Apache-2.0
"""Templates and references of diffusion transformers' LayerNorms; formula in include/flashinfer/dit_layernorm.h."""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

import torch

from ..template import Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var, by_rank

__all__ = [
    "fused_dit_gate_residual_layernorm_gamma_beta_trace",
    "fused_dit_gate_residual_layernorm_scale_shift_trace",
    "fused_dit_residual_layernorm_scale_shift_trace",
]


def _biased(rows: torch.Tensor, bias: Optional[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """One row per token, given as (batch, seq, hidden) or (batch * seq, hidden), plus a bias per column."""
    rows = rows.float().reshape(shape)
    return rows if bias is None else rows + bias.reshape(-1)


def _layernorm(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Variance in one pass, like the kernels: E[x^2] - E[x]^2, which rounding may take below zero."""
    mean = x.mean(dim=-1, keepdim=True)
    variance = (x.square().mean(dim=-1, keepdim=True) - mean.square()).clamp(min=0)
    return (x - mean) * torch.rsqrt(variance + epsilon)


def _modulated(
    x: torch.Tensor,
    epsilon: float,
    scale: torch.Tensor,
    scale_bias: Optional[torch.Tensor],
    shift: torch.Tensor,
    shift_bias: Optional[torch.Tensor],
) -> torch.Tensor:
    return _layernorm(x, epsilon) * (1 + _biased(scale, scale_bias, x.shape)) + _biased(shift, shift_bias, x.shape)


def _gated_residual(
    residual: Optional[torch.Tensor], update: torch.Tensor, factor: Optional[torch.Tensor]
) -> torch.Tensor:
    """residual + update * factor, with the terms that are there."""
    update = update if factor is None else update * factor
    return update if residual is None else residual.float() + update


def _gate_gamma_beta_reference(
    input: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate_bias: Optional[torch.Tensor] = None,
    epsilon: float = 1e-6,
    input_global_scaling_factor: Optional[torch.Tensor] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    update = input.float() * _biased(gate, gate_bias, input.shape)
    r = _gated_residual(residual, update, input_global_scaling_factor)
    return r.to(input.dtype), (_layernorm(r, epsilon) * gamma + beta).to(input.dtype)


def _gate_scale_shift_reference(
    input: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate_bias: Optional[torch.Tensor] = None,
    scale_bias: Optional[torch.Tensor] = None,
    shift_bias: Optional[torch.Tensor] = None,
    epsilon: float = 1e-6,
    input_global_scaling_factor: Optional[torch.Tensor] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    update = input.float() * _biased(gate, gate_bias, input.shape)
    r = _gated_residual(residual, update, input_global_scaling_factor)
    return r.to(input.dtype), _modulated(r, epsilon, scale, scale_bias, shift, shift_bias).to(input.dtype)


def _scale_shift_reference(
    input: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    residual: Optional[torch.Tensor] = None,
    scale_bias: Optional[torch.Tensor] = None,
    shift_bias: Optional[torch.Tensor] = None,
    epsilon: float = 1e-6,
    input_global_scaling_factor: Optional[torch.Tensor] = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    r = _gated_residual(residual, input.float(), input_global_scaling_factor)
    return r.to(input.dtype), _modulated(r, epsilon, scale, scale_bias, shift, shift_bias).to(input.dtype)


def _dit_arguments(
    names: tuple[str, ...],
    rank: int,
    *,
    batch_size: int,
    seq_len: int,
    num_tokens: int = 0,
    hidden_size: int = 3072,
    device: str = "cpu",
) -> dict[str, Any]:
    """Random tensors for the given parameters; gate, scale and shift are slices of one buffer, as the op asks."""
    shape = (batch_size, seq_len, hidden_size)
    tokens = (batch_size, seq_len) if rank == 3 else (batch_size * seq_len,)
    shift, scale, gate = torch.randn(*tokens, 6, hidden_size, device=device).to(torch.bfloat16).unbind(-2)[:3]
    made = {
        "input": torch.randn(shape, device=device).to(torch.bfloat16),
        "residual": torch.randn(shape, device=device).to(torch.bfloat16),
        "gate": gate,
        "scale": scale,
        "shift": shift,
        "gamma": torch.randn(hidden_size, device=device),
        "beta": torch.randn(hidden_size, device=device),
    }
    return {name: made[name] for name in names}


_TOKENS = ("batch_size", "seq_len", "hidden_size")
_FLAT = ("num_tokens", "hidden_size")
_BIAS = Tensor(("hidden_size",), dtype="float32", optional=True)


def _dit_template(rank: int, stem: str, names: tuple[str, ...], reference: Callable[..., Any]) -> TraceTemplate:
    """``names`` are the tensors every call has; ``rank`` is that of the modulation tensors among them."""
    rows = Tensor(
        _TOKENS if rank == 3 else _FLAT, description="a slice of a (batch_size, seq_len, 6, hidden_size) buffer"
    )
    modulations = [name for name in ("gate", "scale", "shift") if name in names]
    inputs: dict[str, Any] = {}
    for name in names:
        vector = Tensor(("hidden_size",), dtype="float32")
        inputs[name] = rows if name in modulations else vector if name in ("gamma", "beta") else Tensor(_TOKENS)
    if "residual" not in names:
        inputs["residual"] = Tensor(_TOKENS, optional=True)
    inputs.update({f"{name}_bias": _BIAS for name in modulations})
    inputs["epsilon"] = Scalar()
    inputs["input_global_scaling_factor"] = Tensor(
        ("one",), dtype="float32", optional=True, description="multiplies the gated input"
    )
    axes: dict[str, Any] = {"batch_size": Var(), "seq_len": Var(), "hidden_size": Const(abbrev="h")}
    if rank == 2:
        axes["num_tokens"] = Var("batch_size * seq_len")
    axes["one"] = Const("a tensor of one element", abbrev="", value=1)
    return TraceTemplate(
        "dit_layernorm",
        axes=axes,
        inputs=inputs,
        outputs={
            "residual_out": Tensor(_TOKENS, param="residual_out", dtype_from="input"),
            "norm_out": Tensor(_TOKENS, param="norm_out", dtype_from="input"),
        },
        name_prefix=stem if rank == 3 else f"{stem}_flat",
        reference=reference,
        init=functools.partial(_dit_arguments, names, rank),
        constraints=["num_tokens == batch_size * seq_len"] if rank == 2 else None,
        description="Gated residual, LayerNorm, then a modulation per channel or per token.",
    )


def _dit_templates(stem: str, names: tuple[str, ...], reference: Callable[..., Any]) -> TraceDispatch:
    first = next(name for name in names if name in ("gate", "scale"))
    return by_rank(first, {rank: _dit_template(rank, stem, names, reference) for rank in (3, 2)})


fused_dit_gate_residual_layernorm_gamma_beta_trace = _dit_templates(
    "fused_dit_gate_residual_layernorm_gamma_beta",
    ("input", "residual", "gate", "gamma", "beta"),
    _gate_gamma_beta_reference,
)
fused_dit_gate_residual_layernorm_scale_shift_trace = _dit_templates(
    "fused_dit_gate_residual_layernorm_scale_shift",
    ("input", "residual", "gate", "scale", "shift"),
    _gate_scale_shift_reference,
)
fused_dit_residual_layernorm_scale_shift_trace = _dit_templates(
    "fused_dit_residual_layernorm_scale_shift",
    ("input", "scale", "shift"),
    _scale_shift_reference,
)
