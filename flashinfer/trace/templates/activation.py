# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.activation``: fp32 arithmetic, the product rounded once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

import torch

from ...errors import ArgumentError
from ..template import Const, Tensor, TraceDispatch, TraceTemplate, Var, by_rank

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
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(input.dtype)


def _swiglu_reference(x: torch.Tensor, gate: torch.Tensor, **_: Any) -> torch.Tensor:
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


_RANKS = range(1, 9)  # definitions need their dimensions named; past eight nobody has asked


def _act_and_mul_template(prefix: str, rank: int, reference: Callable[..., Any]) -> TraceTemplate:
    rows = ["num_tokens"] if rank == 2 else [f"dim{i}" for i in range(rank - 1)]
    return TraceTemplate(
        "activation",
        axes={
            **{axis: Var() for axis in rows},
            "gate_up_size": Const("first half: gate, second half: multiplier", abbrev=""),
            "intermediate_size": Const("half of gate_up_size", abbrev="d"),
        },
        inputs={"input": Tensor([*rows, "gate_up_size"])},
        outputs={"out": Tensor([*rows, "intermediate_size"], param="out", dtype_from="input")},
        name_prefix=prefix if rank == 2 else f"{prefix}_{rank}d",
        reference=reference,
        constraints=["gate_up_size == 2 * intermediate_size"],
        description=f"{prefix.removesuffix('_and_mul')} of the first half of each row times its second half.",
    )


def _act_and_mul_templates(prefix: str, reference: Callable[..., Any]) -> TraceDispatch:
    templates = {rank: _act_and_mul_template(prefix, rank, reference) for rank in _RANKS}

    def choose(*, input: Any, **_: Any) -> TraceTemplate:
        rank = getattr(input, "ndim", -1)
        if rank not in templates:
            raise ArgumentError(f"fi_trace: input has rank {rank}, expected one of {sorted(templates)}")
        # No argument has the size of the result, so the template of a call carries it.
        half = replace(templates[rank].axes["intermediate_size"], value=input.shape[-1] // 2)
        return replace(templates[rank], axes={**templates[rank].axes, "intermediate_size": half})

    return TraceDispatch(choose, tuple(templates.values()))


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


silu_and_mul_trace = _act_and_mul_templates("silu_and_mul", _silu_and_mul_reference)
gelu_and_mul_trace = _act_and_mul_templates("gelu_and_mul", _gelu_and_mul_reference)
gelu_tanh_and_mul_trace = _act_and_mul_templates("gelu_tanh_and_mul", _gelu_tanh_and_mul_reference)
swiglu_trace = by_rank("x", {rank: _swiglu_template(rank) for rank in (0, *_RANKS)})
