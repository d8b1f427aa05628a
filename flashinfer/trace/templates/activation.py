# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.activation``: fp32 arithmetic, the product rounded once."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from ..template import Const, Tensor, TraceDispatch, TraceTemplate, Var, by_rank
from .shared import normal, seeded

__all__ = ["gelu_and_mul_trace", "gelu_tanh_and_mul_trace", "silu_and_mul_trace", "swiglu_trace"]


def _silu_and_mul_reference(input: torch.Tensor, **_: Any) -> torch.Tensor:
    gate, up = input.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def _gelu_and_mul_reference(input: torch.Tensor, **_: Any) -> torch.Tensor:
    gate, up = input.float().chunk(2, dim=-1)
    # Written out: torch's own gelu turns infinity into NaN.
    return (0.5 * gate * (1 + torch.erf(gate * 0.5**0.5)) * up).to(input.dtype)


def _gelu_tanh_and_mul_reference(input: torch.Tensor, **_: Any) -> torch.Tensor:
    gate, up = input.float().chunk(2, dim=-1)
    # Written out: torch's own gelu doubles large numbers on some processors, before it halves them.
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1 + torch.tanh(inner)) * up).to(input.dtype)


def _swiglu_reference(x: torch.Tensor, gate: torch.Tensor, **_: Any) -> torch.Tensor:
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


_RANKS = range(1, 9)  # definitions need their dimensions named; past eight nobody has asked


def _silu_and_mul_init(
    *, num_tokens: int, hidden_size: int = 16384, hidden_div_2: int = 0, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    return {"input": normal(seeded(seed, device), num_tokens, 2 * hidden_div_2 or hidden_size)}


def _gelu_tanh_and_mul_init(
    *, num_tokens: int, hidden_size: int = 16384, hidden_div_2: int = 0, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    return {"input": normal(seeded(seed, device), num_tokens, 2 * hidden_div_2 or hidden_size)}


def _gelu_and_mul_init(
    *, num_tokens: int, hidden_size: int = 16384, hidden_div_2: int = 0, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    return {"input": normal(seeded(seed, device), num_tokens, 2 * hidden_div_2 or hidden_size)}


def _act_and_mul_template(
    prefix: str, rank: int, reference: Callable[..., Any], init: Optional[Callable[..., Any]]
) -> TraceTemplate:
    rows = ["num_tokens"] if rank == 2 else [f"dim{i}" for i in range(rank - 1)]
    return TraceTemplate(
        "activation",
        axes={
            **{axis: Var() for axis in rows},
            "hidden_size": Const("first half: gate, second half: multiplier", abbrev="h"),
            "hidden_div_2": Var(),
        },
        inputs={"input": Tensor([*rows, "hidden_size"])},
        outputs={"output": Tensor([*rows, "hidden_div_2"], param="out", dtype_from="input")},
        name_prefix=prefix if rank == 2 else f"{prefix}_{rank}d",
        reference=reference,
        init=init,
        constraints=["hidden_size == 2 * hidden_div_2"],
        description=f"{prefix.removesuffix('_and_mul')} of the first half of each row times its second half.",
    )


def _act_and_mul_templates(
    prefix: str, reference: Callable[..., Any], init: Callable[..., dict[str, Any]]
) -> TraceDispatch:
    """The published definition is of matrices; other ranks have definitions of ours."""
    ranks = (2, *(rank for rank in _RANKS if rank != 2))
    return by_rank(
        "input", {rank: _act_and_mul_template(prefix, rank, reference, init if rank == 2 else None) for rank in ranks}
    )


def _swiglu_template(rank: int) -> TraceTemplate:
    axes = [f"dim{i}" for i in range(rank)]
    return TraceTemplate(
        "activation",
        axes={axis: Var() for axis in axes},
        inputs={"x": Tensor(axes), "gate": Tensor(axes)},
        outputs={"out": Tensor(axes, param="out", dtype_from="x")},
        name_prefix=f"swiglu_{rank}d",
        reference=_swiglu_reference,
        description="x times the sigmoid of the gate.",
    )


silu_and_mul_trace = _act_and_mul_templates("silu_and_mul", _silu_and_mul_reference, _silu_and_mul_init)
gelu_and_mul_trace = _act_and_mul_templates("gelu_and_mul", _gelu_and_mul_reference, _gelu_and_mul_init)
gelu_tanh_and_mul_trace = _act_and_mul_templates(
    "gelu_tanh_and_mul", _gelu_tanh_and_mul_reference, _gelu_tanh_and_mul_init
)
swiglu_trace = by_rank("x", {rank: _swiglu_template(rank) for rank in (0, *_RANKS)})
