# SPDX-License-Identifier: Apache-2.0
"""Templates and references of layers of experts whose kernels need a Blackwell GPU: a definition runs none.

Weights are described as they are before a kernel's shuffling: rows [up ; gate] of an expert, then columns.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..template import Axis, Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Value, Var
from .fused_moe_reference import fold_experts
from .fused_moe_routing import _route_tokens_reference
from .quantization_blocks import e2m1_values, scale_values
from .shared import normal, randint, seeded

__all__ = [
    "b12x_fused_moe_trace",
    "trtllm_bf16_moe_trace",
    "trtllm_bf16_routed_moe_trace",
    "trtllm_fp4_block_scale_moe_ds_routing_trace",
    "trtllm_fp4_block_scale_moe_trace_dispatch",
    "trtllm_fp8_block_scale_moe_default_routing_trace",
    "trtllm_fp8_block_scale_moe_ds_routing_trace",
    "trtllm_fp8_block_scale_moe_trace_dispatch",
    "trtllm_fp8_block_scale_routed_moe_trace",
]

_DEEPSEEK = 2  # RoutingMethodType.DeepSeekV3


def _unpacked(topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of routed tokens: the expert in the upper 16 bits, its weight as bfloat16 in the lower."""
    weights = ((topk_ids & 0xFFFF) << 16).view(torch.float32)
    return weights, topk_ids >> 16


def _by_blocks(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Numbers ``(.., rows, columns)`` times a scale for 128 x 128 of them."""
    return x.float() * scales.float().repeat_interleave(128, -2).repeat_interleave(128, -1)


def _by_sixteens(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """e2m1 values, two in a byte, times an e4m3 scale for 16 of a row."""
    return e2m1_values(x) * scale_values(scales, True).repeat_interleave(16, -1)


def _trtllm_bf16_moe_reference(
    routing_logits: torch.Tensor,
    routing_bias: Optional[torch.Tensor],
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm2_weights: torch.Tensor,
    local_expert_offset: int = 0,
    routed_scaling_factor: Optional[float] = None,
    routing_method_type: int = 0,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    **_: Any,
) -> torch.Tensor:
    weights, experts = _route_tokens_reference(
        routing_logits, top_k, routing_method_type, routing_bias, n_group or 1, topk_group or 1,
        1.0 if routed_scaling_factor is None else routed_scaling_factor,
    )  # fmt: skip
    x, w1, w2 = hidden_states.float(), gemm1_weights.float(), gemm2_weights.float()
    return fold_experts(x, experts - local_expert_offset, weights, w1, w2).to(torch.bfloat16)


def _trtllm_bf16_routed_moe_reference(
    topk_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm2_weights: torch.Tensor,
    local_expert_offset: int = 0,
    **_: Any,
) -> torch.Tensor:
    weights, experts = _unpacked(topk_ids)
    x, w1, w2 = hidden_states.float(), gemm1_weights.float(), gemm2_weights.float()
    return fold_experts(x, experts - local_expert_offset, weights, w1, w2).to(torch.bfloat16)


def _trtllm_fp8_block_scale_moe_reference(
    routing_logits: torch.Tensor,
    routing_bias: Optional[torch.Tensor],
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    local_expert_offset: int = 0,
    routed_scaling_factor: Optional[float] = 1.0,
    routing_method_type: int = 2,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    **_: Any,
) -> torch.Tensor:
    weights, experts = _route_tokens_reference(
        routing_logits, top_k, routing_method_type, routing_bias, n_group or 1, topk_group or 1,
        1.0 if routed_scaling_factor is None else routed_scaling_factor,
    )  # fmt: skip
    x = hidden_states.float() * hidden_states_scale.T.repeat_interleave(128, 1)
    w1, w2 = _by_blocks(gemm1_weights, gemm1_weights_scale), _by_blocks(gemm2_weights, gemm2_weights_scale)
    return fold_experts(x, experts - local_expert_offset, weights, w1, w2).to(torch.bfloat16)


def _trtllm_fp8_block_scale_routed_moe_reference(
    topk_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    local_expert_offset: int = 0,
    **_: Any,
) -> torch.Tensor:
    weights, experts = _unpacked(topk_ids)
    x = hidden_states.float() * hidden_states_scale.T.repeat_interleave(128, 1)
    w1, w2 = _by_blocks(gemm1_weights, gemm1_weights_scale), _by_blocks(gemm2_weights, gemm2_weights_scale)
    return fold_experts(x, experts - local_expert_offset, weights, w1, w2).to(torch.bfloat16)


def _trtllm_fp4_block_scale_moe_reference(
    routing_logits: torch.Tensor,
    routing_bias: Optional[torch.Tensor],
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    output1_scale_scalar: Optional[torch.Tensor] = None,
    output1_scale_gate_scalar: Optional[torch.Tensor] = None,
    output2_scale_scalar: Optional[torch.Tensor] = None,
    local_expert_offset: int = 0,
    routed_scaling_factor: Optional[float] = 1.0,
    routing_method_type: int = 2,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    **_: Any,
) -> torch.Tensor:
    """The scalars of an expert multiply the up rows, the gate rows and the rows of the second product."""
    weights, experts = _route_tokens_reference(
        routing_logits, top_k, routing_method_type, routing_bias, n_group or 1, topk_group or 1,
        1.0 if routed_scaling_factor is None else routed_scaling_factor,
    )  # fmt: skip
    x = _by_sixteens(hidden_states, hidden_states_scale)
    w1, w2 = _by_sixteens(gemm1_weights, gemm1_weights_scale), _by_sixteens(gemm2_weights, gemm2_weights_scale)
    half = w1.shape[1] // 2
    if output1_scale_scalar is not None:
        w1[:, :half] *= output1_scale_scalar.view(-1, 1, 1)
    if output1_scale_gate_scalar is not None:
        w1[:, half:] *= output1_scale_gate_scalar.view(-1, 1, 1)
    if output2_scale_scalar is not None:
        w2 *= output2_scale_scalar.view(-1, 1, 1)
    return fold_experts(x, experts - local_expert_offset, weights, w1, w2).to(torch.bfloat16)


def _b12x_fused_moe_reference(
    x: torch.Tensor,
    w1_weight: torch.Tensor,
    w1_weight_sf: torch.Tensor,
    w2_weight: torch.Tensor,
    w2_weight_sf: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    w1_alpha: torch.Tensor,
    w2_alpha: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Scales row by row. The activations between the products are not rounded."""
    w1 = _by_sixteens(w1_weight, w1_weight_sf) * w1_alpha.view(-1, 1, 1)
    w2 = _by_sixteens(w2_weight, w2_weight_sf) * w2_alpha.view(-1, 1, 1)
    return fold_experts(x.float(), token_selected_experts, token_final_scales, w1, w2).to(torch.bfloat16)


def _fp8(g: torch.Generator, *shape: int) -> torch.Tensor:
    return normal(g, *shape, dtype=torch.float32).to(torch.float8_e4m3fn)


def _trtllm_fp8_block_scale_moe_init(
    *,
    seq_len: int,
    num_experts: int = 16,
    num_local_experts: int = 16,
    hidden_size: int = 256,
    intermediate_size: int = 128,
    top_k: int = 4,
    n_group: int = 4,
    topk_group: int = 2,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    h, i, e = hidden_size, intermediate_size, num_local_experts

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g, device=device) * 0.1

    return {
        "routing_logits": normal(g, seq_len, num_experts, dtype=torch.float32),
        "routing_bias": normal(g, num_experts),
        "hidden_states": _fp8(g, seq_len, h),
        "hidden_states_scale": scales(h // 128, seq_len),
        "gemm1_weights": _fp8(g, e, 2 * i, h),
        "gemm1_weights_scale": scales(e, 2 * i // 128, h // 128),
        "gemm2_weights": _fp8(g, e, h, i),
        "gemm2_weights_scale": scales(e, h // 128, i // 128),
        "num_experts": num_experts,
        "top_k": top_k,
        "n_group": n_group,
        "topk_group": topk_group,
        "intermediate_size": i,
        "local_expert_offset": 0,
        "local_num_experts": e,
        "routed_scaling_factor": 2.5,
        "routing_method_type": _DEEPSEEK,
    }


def _b12x_fused_moe_init(
    *,
    num_tokens: int,
    num_experts: int = 8,
    hidden_size: int = 128,
    intermediate_size: int = 64,
    top_k: int = 2,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g, h, i, e = seeded(seed, device), hidden_size, intermediate_size, num_experts

    def operand(rows: int, columns: int) -> list[torch.Tensor]:
        codes = randint(g, 256, e, rows, columns // 2).to(torch.uint8)
        return [codes, randint(g, 72, e, rows, columns // 16, low=40).to(torch.uint8)]

    experts = torch.rand(num_tokens, e, generator=g, device=device).argsort(1)[:, :top_k].int()
    made = dict(
        zip(("w1_weight", "w1_weight_sf", "w2_weight", "w2_weight_sf"), operand(2 * i, h) + operand(h, i), strict=True)
    )
    return {
        "x": normal(g, num_tokens, h),
        **made,
        "token_selected_experts": experts,
        "token_final_scales": torch.rand(num_tokens, top_k, generator=g, device=device),
        "num_experts": e,
        "top_k": top_k,
        "w1_alpha": torch.full((e,), 0.1, device=device),
        "w2_alpha": torch.full((e,), 0.1, device=device),
    }


_ROUTING: dict[str, Value] = {
    "routing_logits": Tensor(("seq_len", "num_experts")),
    "routing_bias": Tensor(("num_experts",), optional=True),
}
_ROUTED: dict[str, Value] = {
    "topk_ids": Tensor(("seq_len", "top_k"), dtype="int32", description="expert << 16 | weight")
}
_NUMBERS: dict[str, Value] = {"local_expert_offset": Scalar("int32"), "routed_scaling_factor": Scalar(optional=True)}
_OUTPUT: dict[str, Value] = {"output": Tensor(("seq_len", "hidden_size"), param="output", dtype="bfloat16")}
_TOP_K: dict[str, Axis] = {"top_k": Const("experts of a token", abbrev="topk")}
_GROUPS: dict[str, Axis] = {
    "n_group": Const("groups of experts", abbrev="ng"),
    "topk_group": Const("groups that a token may choose from", abbrev="kg"),
}
_LAYER: dict[str, Axis] = {
    "num_local_experts": Const("experts of this rank", abbrev="e"),
    "hidden_size": Const(abbrev="h"),
    "intermediate_size": Const(abbrev="i"),
    "gemm1_out_size": Const("2 * intermediate_size", abbrev=""),
}
_TOKENS: dict[str, Axis] = {"seq_len": Var("tokens")}
_EXPERTS: dict[str, Axis] = {"num_experts": Const("experts that the router knows", abbrev="")}
_BF16: dict[str, Value] = {
    "hidden_states": Tensor(("seq_len", "hidden_size")),
    "gemm1_weights": Tensor(("num_local_experts", "gemm1_out_size", "hidden_size")),
    "gemm2_weights": Tensor(("num_local_experts", "hidden_size", "intermediate_size")),
}
_FP8_BLOCKS: dict[str, Axis] = {
    "num_hidden_blocks": Const("hidden_size / 128", abbrev=""),
    "num_intermediate_blocks": Const("intermediate_size / 128", abbrev=""),
    "num_gemm1_out_blocks": Const("gemm1_out_size / 128", abbrev=""),
}
_FP8: dict[str, Value] = {
    "hidden_states": Tensor(("seq_len", "hidden_size")),
    "hidden_states_scale": Tensor(("num_hidden_blocks", "seq_len")),
    "gemm1_weights": Tensor(("num_local_experts", "gemm1_out_size", "hidden_size")),
    "gemm1_weights_scale": Tensor(("num_local_experts", "num_gemm1_out_blocks", "num_hidden_blocks")),
    "gemm2_weights": Tensor(("num_local_experts", "hidden_size", "intermediate_size")),
    "gemm2_weights_scale": Tensor(("num_local_experts", "num_hidden_blocks", "num_intermediate_blocks")),
}
_METHOD: dict[str, Value] = {"routing_method_type": Scalar("int32", description="a RoutingMethodType")}

trtllm_bf16_moe_trace = TraceTemplate(
    "moe",
    axes={**_TOKENS, **_TOP_K, **_LAYER, **_EXPERTS},
    inputs={**_ROUTING, **_BF16, **_NUMBERS, **_METHOD},
    outputs=_OUTPUT,
    name_prefix="moe_bf16",
    reference=_trtllm_bf16_moe_reference,
    description="Routing, then a layer of experts in bfloat16.",
)
trtllm_bf16_routed_moe_trace = TraceTemplate(
    "moe",
    axes={**_TOKENS, **_TOP_K, **_LAYER},
    inputs={**_ROUTED, **_BF16, "local_expert_offset": Scalar("int32")},
    outputs=_OUTPUT,
    name_prefix="moe_bf16_routed",
    reference=_trtllm_bf16_routed_moe_reference,
    description="A layer of experts in bfloat16 for tokens that are routed.",
)
trtllm_fp8_block_scale_moe_ds_routing_trace = TraceTemplate(
    "moe",
    axes={**_TOKENS, **_TOP_K, **_GROUPS, **_LAYER, **_EXPERTS, **_FP8_BLOCKS},
    inputs={**_ROUTING, **_FP8, **_NUMBERS},
    outputs=_OUTPUT,
    name_prefix="moe_fp8_block_scale_ds_routing",
    reference=_trtllm_fp8_block_scale_moe_reference,
    init=_trtllm_fp8_block_scale_moe_init,
    description="DeepSeek-V3's routing, then a layer of experts in e4m3 with a scale for 128 columns, or 128 x 128.",
)
trtllm_fp8_block_scale_moe_default_routing_trace = TraceTemplate(
    "moe",
    axes={**_TOKENS, **_TOP_K, **_LAYER, **_EXPERTS, **_FP8_BLOCKS},
    inputs={**_ROUTING, **_FP8, **_NUMBERS, **_METHOD},
    outputs=_OUTPUT,
    name_prefix="moe_fp8_block_scale_default_routing",
    reference=_trtllm_fp8_block_scale_moe_reference,
    description="Routing by a method without groups, then a layer of experts in e4m3 with block scales.",
)
trtllm_fp8_block_scale_routed_moe_trace = TraceTemplate(
    "moe",
    axes={**_TOKENS, **_TOP_K, **_LAYER, **_FP8_BLOCKS},
    inputs={**_ROUTED, **_FP8, "local_expert_offset": Scalar("int32")},
    outputs=_OUTPUT,
    name_prefix="moe_fp8_block_scale_routed",
    reference=_trtllm_fp8_block_scale_routed_moe_reference,
    description="A layer of experts in e4m3 with block scales for tokens that are routed.",
)


def _pairs(name: str) -> Const:
    return Const(f"{name} / 2", abbrev="")


_FP4_AXES: dict[str, Axis] = {
    **_TOKENS,
    **_TOP_K,
    **_GROUPS,
    "num_local_experts": _LAYER["num_local_experts"],
    "hidden_size": Const(abbrev="h", of=lambda sizes: 2 * sizes["hidden_pairs"]),
    "intermediate_size": Const(abbrev="i", of=lambda sizes: 2 * sizes["intermediate_pairs"]),
    **_EXPERTS,
    "gemm1_out_size": _LAYER["gemm1_out_size"],
    "hidden_pairs": _pairs("hidden_size"),
    "intermediate_pairs": _pairs("intermediate_size"),
    "hidden_scales": Const("hidden_size / 16", abbrev=""),
    "intermediate_scales": Const("intermediate_size / 16", abbrev=""),
}
_SCALE_OF_EXPERTS = Tensor(("num_local_experts",), dtype="float32", optional=True)
trtllm_fp4_block_scale_moe_ds_routing_trace = TraceTemplate(
    "moe",
    axes=_FP4_AXES,
    inputs={
        **_ROUTING,
        "hidden_states": Tensor(("seq_len", "hidden_pairs"), dtype="uint8"),
        "hidden_states_scale": Tensor(("seq_len", "hidden_scales")),
        "gemm1_weights": Tensor(("num_local_experts", "gemm1_out_size", "hidden_pairs"), dtype="uint8"),
        "gemm1_weights_scale": Tensor(("num_local_experts", "gemm1_out_size", "hidden_scales")),
        "gemm2_weights": Tensor(("num_local_experts", "hidden_size", "intermediate_pairs"), dtype="uint8"),
        "gemm2_weights_scale": Tensor(("num_local_experts", "hidden_size", "intermediate_scales")),
        "output1_scale_scalar": _SCALE_OF_EXPERTS,
        "output1_scale_gate_scalar": _SCALE_OF_EXPERTS,
        "output2_scale_scalar": _SCALE_OF_EXPERTS,
        **_NUMBERS,
    },
    outputs=_OUTPUT,
    name_prefix="moe_fp4_block_scale_ds_routing",
    reference=_trtllm_fp4_block_scale_moe_reference,
    description="DeepSeek-V3's routing, then a layer of experts in e2m1 with an e4m3 scale for 16 values.",
)

b12x_fused_moe_trace = TraceTemplate(
    "moe",
    axes={
        "num_tokens": Var("tokens"),
        "top_k": Const("experts of a token", abbrev="topk"),
        "num_experts": Const("experts of this rank", abbrev="e"),
        "hidden_size": Const(abbrev="h"),
        "intermediate_size": Const(abbrev="i", of=lambda sizes: 2 * sizes["intermediate_pairs"]),
        "gemm1_out_size": Const("2 * intermediate_size", abbrev=""),
        "hidden_pairs": _pairs("hidden_size"),
        "intermediate_pairs": _pairs("intermediate_size"),
        "hidden_scales": Const("hidden_size / 16", abbrev="", of=lambda sizes: sizes["hidden_size"] // 16),
        "intermediate_scales": Const(
            "intermediate_size / 16", abbrev="", of=lambda sizes: sizes["intermediate_size"] // 16
        ),
    },
    inputs={
        "x": Tensor(("num_tokens", "hidden_size")),
        "w1_weight": Tensor(("num_experts", "gemm1_out_size", "hidden_pairs"), dtype="uint8"),
        "w1_weight_sf": Tensor(("num_experts", "gemm1_out_size", "hidden_scales"), unread=True),
        "w2_weight": Tensor(("num_experts", "hidden_size", "intermediate_pairs"), dtype="uint8"),
        "w2_weight_sf": Tensor(("num_experts", "hidden_size", "intermediate_scales"), unread=True),
        "token_selected_experts": Tensor(("num_tokens", "top_k")),
        "token_final_scales": Tensor(("num_tokens", "top_k")),
        "w1_alpha": Tensor(("num_experts",)),
        "w2_alpha": Tensor(("num_experts",)),
    },
    outputs={"output": Tensor(("num_tokens", "hidden_size"), param="output", dtype="bfloat16")},
    name_prefix="b12x_fused_moe",
    reference=_b12x_fused_moe_reference,
    init=_b12x_fused_moe_init,
    description="A layer of experts whose weights are e2m1 with an e4m3 scale for 16 values.",
)


def _choose_fp8(routing_method_type: int = 0, **_: Any) -> TraceTemplate:
    if int(routing_method_type) == _DEEPSEEK:
        return trtllm_fp8_block_scale_moe_ds_routing_trace
    return trtllm_fp8_block_scale_moe_default_routing_trace


def _choose_fp4(**_: Any) -> TraceTemplate:
    return trtllm_fp4_block_scale_moe_ds_routing_trace


trtllm_fp8_block_scale_moe_trace_dispatch = TraceDispatch(
    _choose_fp8, (trtllm_fp8_block_scale_moe_ds_routing_trace, trtllm_fp8_block_scale_moe_default_routing_trace)
)
trtllm_fp4_block_scale_moe_trace_dispatch = TraceDispatch(_choose_fp4, (trtllm_fp4_block_scale_moe_ds_routing_trace,))
