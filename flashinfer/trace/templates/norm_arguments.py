# SPDX-License-Identifier: Apache-2.0
"""Arguments and checks of the templates of ``flashinfer.norm``; each travels as text with its definition."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..check import default_check
from .shared import normal, seeded

__all__: list[str] = []


def _norm_check(
    reference_outputs: Any,
    actual_outputs: Any,
    *,
    rtol: float = 1e-3,
    atol: float = 1e-3,
    max_mismatch_pct: float = 0.0,
    min_cos_sim: Optional[float] = None,
) -> bool:
    limits: dict[str, Any] = {
        "rtol": rtol,
        "atol": atol,
        "max_mismatch_pct": max_mismatch_pct,
        "min_cos_sim": min_cos_sim,
    }
    return default_check(reference_outputs, actual_outputs, **limits)


def _layernorm_check(
    reference_outputs: Any, actual_outputs: Any, *, rtol: float = 1e-2, atol: float = 1e-2, **limits: Any
) -> bool:
    return _norm_check(reference_outputs, actual_outputs, rtol=rtol, atol=atol, **limits)


def _norm_quant_check(
    reference_outputs: Any, actual_outputs: Any, *, rtol: float = 1.0, atol: float = 1.0, **limits: Any
) -> bool:
    # A value near the middle of two fp8 neighbours may fall to either side.
    return _norm_check(reference_outputs, actual_outputs, rtol=rtol, atol=atol, **limits)


def _fused_add_rmsnorm_quant_check(reference_outputs: Any, actual_outputs: Any, **limits: Any) -> bool:
    """The first output is fp8, the residual is not."""
    if len(reference_outputs) != len(actual_outputs):
        return False
    pairs = [list(x.values()) if isinstance(x, dict) else list(x) for x in (reference_outputs, actual_outputs)]
    (out, residual), (actual_out, actual_residual) = pairs
    return _norm_quant_check(out, actual_out, **limits) and _norm_check(residual, actual_residual, **limits)


def _rmsnorm_init(*, batch_size: int, hidden_size: int = 4096, device: Any = "cuda", seed: int = 0) -> dict[str, Any]:
    g = seeded(seed, device)
    return {"input": normal(g, batch_size, hidden_size), "weight": normal(g, hidden_size)}


def _fused_add_rmsnorm_init(
    *, batch_size: int, hidden_size: int = 5120, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "input": normal(g, batch_size, hidden_size),
        "residual": normal(g, batch_size, hidden_size),
        "weight": normal(g, hidden_size),
    }


def _rmsnorm_quant_init(
    *, batch_size: int, hidden_size: int = 7168, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "out": torch.empty(batch_size, hidden_size, dtype=torch.float8_e4m3fn, device=device),
        "input": normal(g, batch_size, hidden_size),
        "weight": normal(g, hidden_size),
        "scale": torch.full((1,), 0.5, device=device),
    }


def _fused_add_rmsnorm_quant_init(
    *, batch_size: int, hidden_size: int = 7168, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "out": torch.empty(batch_size, hidden_size, dtype=torch.float8_e4m3fn, device=device),
        "input": normal(g, batch_size, hidden_size),
        "residual": normal(g, batch_size, hidden_size),
        "weight": normal(g, hidden_size),
        "scale": torch.full((1,), 0.5, device=device),
    }


def _gemma_rmsnorm_init(
    *, batch_size: int, hidden_size: int = 4608, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {"input": normal(g, batch_size, hidden_size), "weight": normal(g, hidden_size)}


def _gemma_fused_add_rmsnorm_init(
    *, batch_size: int, hidden_size: int = 4608, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "input": normal(g, batch_size, hidden_size),
        "residual": normal(g, batch_size, hidden_size),
        "weight": normal(g, hidden_size),
    }


def _layernorm_init(*, batch_size: int, hidden_size: int = 768, device: Any = "cuda", seed: int = 0) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "input": normal(g, batch_size, hidden_size),
        "gemma": normal(g, hidden_size, dtype=torch.float32),
        "beta": normal(g, hidden_size, dtype=torch.float32),
    }


def _layernorm_quant_init(
    *, batch_size: int, hidden_size: int = 768, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "out": torch.empty(batch_size, hidden_size, dtype=torch.float8_e4m3fn, device=device),
        "input": normal(g, batch_size, hidden_size),
        "gemma": normal(g, hidden_size, dtype=torch.float32),
        "beta": normal(g, hidden_size, dtype=torch.float32),
        "scale": torch.full((1,), 0.5, device=device),
    }
