# SPDX-License-Identifier: Apache-2.0
"""Template and reference of ``flashinfer.fused_moe.mono_moe``."""

from __future__ import annotations

from typing import Any

import torch

from ..check import default_check
from ..notation import template_of_text
from ..template import TraceDispatch, TraceTemplate
from .fused_moe_routing import _best
from .gemm_blocks import spread_scales, to_e4m3_blocks
from .shared import normal, seeded, to_fp8

__all__ = ["mono_moe_trace"]


def _rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Values of (n, k) after rounding to bf16 and quantisation to e4m3 by row and 128 columns."""
    codes, scales = to_e4m3_blocks(x.to(torch.bfloat16).float(), 1)
    return codes.float() * scales.repeat_interleave(128, dim=1)


def _mono_check(
    reference_outputs: Any,
    actual_outputs: Any,
    *,
    max_mismatch_pct: float = 100.0,
    min_cos_sim: float = 0.998,
    **tolerances: Any,
) -> bool:
    # Hidden values are rounded to e4m3 twice independently if the weight of an expert is applied elsewhere: 3.7 %.
    limits = {"max_mismatch_pct": max_mismatch_pct, "min_cos_sim": min_cos_sim, **tolerances}
    return default_check(reference_outputs, actual_outputs, **limits)


def _mono_moe(
    scores: torch.Tensor,
    activations_in: torch.Tensor,
    expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor,
    expert_weights_down: torch.Tensor,
    expert_scales_down: torch.Tensor,
    top_k: int,
    renormalize: bool,
) -> torch.Tensor:
    """The weight of an expert is part of its hidden values, before they are rounded."""
    experts = _best(scores, top_k)
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    x, half = _rounded_rows(activations_in), expert_weights_up.shape[1] // 2
    out = torch.zeros(activations_in.shape, device=activations_in.device)
    for token in range(x.shape[0]):
        for slot, e in enumerate(experts[token].tolist()):
            up = expert_weights_up[e].float() * spread_scales(expert_scales_up[e], *expert_weights_up.shape[1:])
            down = expert_weights_down[e].float() * spread_scales(expert_scales_down[e], *expert_weights_down.shape[1:])
            z = up @ x[token]
            hidden = torch.nn.functional.silu(z[:half]) * z[half:] * weights[token, slot]
            out[token] += down @ _rounded_rows(hidden.unsqueeze(0))[0]
    return out.to(torch.bfloat16)


def _mono_moe_softmax_reference(
    activations_in: torch.Tensor,
    router_logits: torch.Tensor,
    expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor,
    expert_weights_down: torch.Tensor,
    expert_scales_down: torch.Tensor,
    top_k: int,
    renormalize: bool = True,
    **_: Any,
) -> torch.Tensor:
    scores = router_logits.float().softmax(dim=1)
    matrices = (expert_weights_up, expert_scales_up, expert_weights_down, expert_scales_down)
    return _mono_moe(scores, activations_in, *matrices, top_k, renormalize)


def _mono_moe_sigmoid_reference(
    activations_in: torch.Tensor,
    router_logits: torch.Tensor,
    expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor,
    expert_weights_down: torch.Tensor,
    expert_scales_down: torch.Tensor,
    top_k: int,
    renormalize: bool = True,
    **_: Any,
) -> torch.Tensor:
    scores = router_logits.float().sigmoid()
    matrices = (expert_weights_up, expert_scales_up, expert_weights_down, expert_scales_down)
    return _mono_moe(scores, activations_in, *matrices, top_k, renormalize)


def _mono_moe_init(
    *,
    num_tokens: int,
    num_experts: int = 256,
    hidden_size: int = 2048,
    intermediate_size: int = 512,
    up_rows: int = 1024,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)

    def weights(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = to_fp8(normal(g, num_experts, rows, columns).float() * 64, torch.float8_e4m3fn)
        scales = torch.rand(num_experts, rows // 128, columns // 128, generator=g, device=device) + 0.5
        return codes, scales * columns**-0.5 / 64

    up, up_scales = weights(up_rows, hidden_size)
    down, down_scales = weights(hidden_size, intermediate_size)
    return {
        "activations_in": normal(g, num_tokens, hidden_size),
        "router_logits": normal(g, num_tokens, num_experts),
        "expert_weights_up": up,
        "expert_scales_up": up_scales,
        "expert_weights_down": down,
        "expert_scales_down": down_scales,
        "top_k": 8,
    }


def _mono_moe_sigmoid_init(
    *,
    num_tokens: int,
    num_experts: int = 256,
    hidden_size: int = 2048,
    intermediate_size: int = 512,
    up_rows: int = 1024,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
    made = _mono_moe_init(num_tokens=num_tokens, **sizes, up_rows=up_rows, device=device, seed=seed)
    return {**made, "scoring_func": "sigmoid"}


def _template(name: str, score: str, reference: Any, init: Any) -> Any:
    return template_of_text(
        f"{name}_e{{num_experts}}_h{{hidden_size}}_i{{intermediate_size}}",
        "moe",
        var="num_tokens",
        hidden="up_rows up_blocks hidden_blocks intermediate_blocks",
        inputs="activations_in[num_tokens, hidden_size]; router_logits[num_tokens, num_experts];"
        "expert_weights_up[num_experts, up_rows, hidden_size]; expert_scales_up[num_experts, up_blocks, hidden_blocks];"
        "expert_weights_down[num_experts, hidden_size, intermediate_size];"
        "expert_scales_down[num_experts, hidden_blocks, intermediate_blocks]; top_k:int32; renormalize:bool?",
        outputs="output[num_tokens, hidden_size]<-out:bfloat16",
        notes={"expert_weights_up": "[gate ; up]"},
        reference=reference,
        init=init,
        check=_mono_check,
        description=f"A layer of experts for few tokens, routed by {score} of the logits; e4m3 weights in blocks.",
    )


_softmax = _template("mono_moe", "softmax", _mono_moe_softmax_reference, _mono_moe_init)
_sigmoid = _template("mono_moe_sigmoid", "sigmoid", _mono_moe_sigmoid_reference, _mono_moe_sigmoid_init)


def _choose(scoring_func: str = "softmax", **_: Any) -> TraceTemplate:
    return _sigmoid if scoring_func == "sigmoid" else _softmax


mono_moe_trace = TraceDispatch(_choose, (_softmax, _sigmoid))
