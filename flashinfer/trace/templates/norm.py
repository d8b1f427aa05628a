# SPDX-License-Identifier: Apache-2.0
"""Templates and references of ``flashinfer.norm``.

All arithmetic is fp32 with one rounding at the end, except where a comment says otherwise. The diffusion-transformer
ops have files of their own and are gathered here.
"""

from __future__ import annotations

from typing import Any, Callable, Union

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var, by_rank
from .norm_arguments import (
    _fused_add_rmsnorm_init,
    _fused_add_rmsnorm_quant_check,
    _fused_add_rmsnorm_quant_init,
    _gemma_fused_add_rmsnorm_init,
    _gemma_rmsnorm_init,
    _layernorm_check,
    _layernorm_init,
    _layernorm_quant_init,
    _norm_check,
    _norm_quant_check,
    _rmsnorm_init,
    _rmsnorm_quant_init,
)
from .norm_dit import (
    fused_dit_gate_residual_layernorm_gamma_beta_trace,
    fused_dit_gate_residual_layernorm_scale_shift_trace,
    fused_dit_residual_layernorm_scale_shift_trace,
)
from .norm_rope import fused_qk_rmsnorm_rope_trace
from .shared import normalize, to_fp8

__all__ = [
    "fused_add_rmsnorm_quant_trace",
    "fused_add_rmsnorm_trace",
    "fused_dit_gate_residual_layernorm_gamma_beta_trace",
    "fused_dit_gate_residual_layernorm_scale_shift_trace",
    "fused_dit_residual_layernorm_scale_shift_trace",
    "fused_qk_rmsnorm_rope_trace",
    "fused_rmsnorm_silu_trace",
    "gemma_fused_add_rmsnorm_trace",
    "gemma_rmsnorm_trace",
    "layernorm_quant_trace",
    "layernorm_trace",
    "rmsnorm_quant_trace",
    "rmsnorm_trace",
]


def _rmsnorm_reference(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, **_: Any) -> torch.Tensor:
    return (normalize(hidden_states.float(), eps) * weight.float()).to(hidden_states.dtype)


def _gemma_rmsnorm_reference(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, **_: Any) -> torch.Tensor:
    return (normalize(input.float(), eps) * (1 + weight.float())).to(input.dtype)


def _fused_add_rmsnorm_reference(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    total = hidden_states.float() + residual.float()  # normalised as it is; only the stored residual is rounded
    output = normalize(total, eps) * weight.float()
    return output.to(hidden_states.dtype), total.to(residual.dtype)


def _gemma_fused_add_rmsnorm_reference(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fused_add_rmsnorm_reference(input, residual, 1 + weight.float(), eps)


def _quantize(x: torch.Tensor, scale: Union[torch.Tensor, float], dtype: torch.dtype) -> torch.Tensor:
    # The kernels multiply by the rounded reciprocal; dividing would round some values the other way.
    inverse = torch.as_tensor(scale, dtype=torch.float32, device=x.device).reshape(()).reciprocal()
    return to_fp8(x * inverse, dtype)


def _rmsnorm_quant_reference(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    scale: Union[torch.Tensor, float],
    eps: float = 1e-6,
    out_dtype: torch.dtype = torch.float8_e4m3fn,
    **_: Any,
) -> torch.Tensor:
    return _quantize(normalize(hidden_states.float(), eps) * weight.float(), scale, out_dtype)


def _fused_add_rmsnorm_quant_reference(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: Union[torch.Tensor, float],
    eps: float = 1e-6,
    out_dtype: torch.dtype = torch.float8_e4m3fn,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = hidden_states.float() + residual.float()
    return _quantize(normalize(total, eps) * weight.float(), scale, out_dtype), total.to(residual.dtype)


def _layernorm_reference(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-6, **_: Any
) -> torch.Tensor:
    x = input.float()
    centred = x - x.mean(dim=-1, keepdim=True)
    return (normalize(centred, eps) * weight + bias).to(input.dtype)


def _layernorm_quant_reference(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    scale: Union[torch.Tensor, float],
    eps: float = 1e-6,
    out_dtype: torch.dtype = torch.float8_e4m3fn,
    **_: Any,
) -> torch.Tensor:
    # Two roundings by contract: to the input's dtype, then to fp8.
    return _quantize(_layernorm_reference(hidden_states, weight, bias, eps).float(), scale, out_dtype)


def _fused_rmsnorm_silu_reference(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out_dtype: torch.dtype = torch.bfloat16,
    **_: Any,
) -> torch.Tensor:
    y = normalize(hidden_states.float(), eps) * weight.float()
    y = y * torch.sigmoid(y)
    return to_fp8(y, out_dtype) if out_dtype.itemsize == 1 else y.to(out_dtype)


_ROWS: dict[str, Axis] = {"batch_size": Var("rows, each normalised on its own"), "hidden_size": Const(abbrev="h")}
_HEADS: dict[str, Axis] = {
    "batch_size": Var(),
    "num_heads": Var(),
    "head_dim": Const("normalised dimension", abbrev="d"),
}
_MATRIX = ("batch_size", "hidden_size")
_VECTOR = ("hidden_size",)
_INPUT = Tensor(_MATRIX, param="input")
_OUTPUT = Tensor(_MATRIX, param="out", dtype_from="hidden_states")
_RESIDUAL = Tensor(_MATRIX, description="replaced by hidden_states + residual")
_RESIDUAL_OUT = Tensor(_MATRIX, param="residual", dtype_from="residual", description="hidden_states + residual")
_WEIGHT = Tensor(_VECTOR)
_SCALE = Scalar(description="the result is divided by it before the conversion to fp8")
_FP8_OUT = Tensor(_MATRIX, param="out", dtype_from="out", dtype="float8_e4m3fn")


def _rmsnorm_templates(
    prefix: str, reference: Callable[..., Any], init: Callable[..., Any], description: str
) -> TraceDispatch:
    """The published definition is of rows; heads that are normalised one by one have one of ours."""
    heads = ("batch_size", "num_heads", "head_dim")
    return by_rank(
        "input",
        {
            2: TraceTemplate(
                "rmsnorm",
                axes=_ROWS,
                inputs={"hidden_states": _INPUT, "weight": _WEIGHT},
                outputs={"output": _OUTPUT},
                name_prefix=prefix,
                reference=reference,
                check=_norm_check,
                init=init,
                description=description,
            ),
            3: TraceTemplate(
                "rmsnorm",
                axes=_HEADS,
                inputs={"hidden_states": Tensor(heads, param="input"), "weight": Tensor(("head_dim",))},
                outputs={"output": Tensor(heads, param="out", dtype_from="hidden_states")},
                name_prefix=f"{prefix}_heads",
                reference=reference,
                description=f"{description} Every head is normalised on its own.",
            ),
        },
    )


rmsnorm_trace = _rmsnorm_templates("rmsnorm", _rmsnorm_reference, _rmsnorm_init, "x / rms(x) * weight.")
gemma_rmsnorm_trace = _rmsnorm_templates(
    "gemma_rmsnorm", _gemma_rmsnorm_reference, _gemma_rmsnorm_init, "x / rms(x) * (1 + weight)."
)


def _fused_add_template(
    prefix: str, reference: Callable[..., Any], init: Callable[..., Any], description: str
) -> TraceTemplate:
    return TraceTemplate(
        "rmsnorm",
        axes=_ROWS,
        inputs={"hidden_states": _INPUT, "residual": _RESIDUAL, "weight": _WEIGHT},
        outputs={"output": Tensor(_MATRIX, param="input", dtype_from="hidden_states"), "residual": _RESIDUAL_OUT},
        name_prefix=prefix,
        reference=reference,
        init=init,
        description=description,
    )


fused_add_rmsnorm_trace = _fused_add_template(
    "fused_add_rmsnorm",
    _fused_add_rmsnorm_reference,
    _fused_add_rmsnorm_init,
    "s = input + residual; s / rms(s) * weight, in place.",
)
gemma_fused_add_rmsnorm_trace = _fused_add_template(
    "gemma_fused_add_rmsnorm",
    _gemma_fused_add_rmsnorm_reference,
    _gemma_fused_add_rmsnorm_init,
    "s = input + residual; s / rms(s) * (1 + weight), in place.",
)

rmsnorm_quant_trace = TraceTemplate(
    "rmsnorm",
    axes=_ROWS,
    inputs={"hidden_states": _INPUT, "weight": _WEIGHT, "scale": _SCALE},
    outputs={"out": _FP8_OUT},
    name_prefix="rmsnorm_quant",
    reference=_rmsnorm_quant_reference,
    check=_norm_quant_check,
    init=_rmsnorm_quant_init,
    description="x / rms(x) * weight, quantised to fp8.",
)
fused_add_rmsnorm_quant_trace = TraceTemplate(
    "rmsnorm",
    axes=_ROWS,
    inputs={"hidden_states": _INPUT, "residual": _RESIDUAL, "weight": _WEIGHT, "scale": _SCALE},
    outputs={"out": _FP8_OUT, "residual": _RESIDUAL_OUT},
    name_prefix="fused_add_rmsnorm_quant",
    reference=_fused_add_rmsnorm_quant_reference,
    check=_fused_add_rmsnorm_quant_check,
    init=_fused_add_rmsnorm_quant_init,
    description="s = input + residual, in place; s / rms(s) * weight, quantised to fp8.",
)

_GAMMA = Tensor(_VECTOR, param="gemma", dtype="float32", description="gamma; the API spells it so")
_BETA = Tensor(_VECTOR, param="beta", dtype="float32")
layernorm_trace = TraceTemplate(
    "layernorm",
    axes=_ROWS,
    inputs={"hidden_states": _INPUT, "weight": _GAMMA, "bias": _BETA},
    outputs={"output": Tensor(_MATRIX, dtype_from="hidden_states")},
    reference=_layernorm_reference,
    check=_layernorm_check,
    init=_layernorm_init,
    description="(x - mean) / std * weight + bias.",
)
layernorm_quant_trace = TraceTemplate(
    "layernorm",
    axes=_ROWS,
    inputs={"hidden_states": _INPUT, "weight": _GAMMA, "bias": _BETA, "scale": _SCALE},
    outputs={"out": _FP8_OUT},
    name_prefix="layernorm_quant",
    reference=_layernorm_quant_reference,
    check=_norm_quant_check,
    init=_layernorm_quant_init,
    description="(x - mean) / std * weight + bias, rounded to the input's dtype, then quantised to fp8.",
)

_TOKENS = ("num_tokens", "hidden_size")
fused_rmsnorm_silu_trace = TraceTemplate(
    "rmsnorm",
    axes={"num_tokens": Var(), "hidden_size": Const(abbrev="h")},
    inputs={"hidden_states": Tensor(_TOKENS, param="input"), "weight": _WEIGHT},
    outputs={"out": Tensor(_TOKENS, param="out", dtype_from="out")},
    name_prefix="fused_rmsnorm_silu",
    reference=_fused_rmsnorm_silu_reference,
    description="silu(x / rms(x) * weight).",
)
