# SPDX-License-Identifier: Apache-2.0
"""``cutlass_fused_moe`` as vLLM 0.33 calls it on Hopper, and layers of experts as their models define them."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

import torch

from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.fused_moe.core import ActivationType

#: No token, one, few, and more than the kernels for few tokens take.
TOKENS = (0, 1, 3, 17)
INF = math.inf


def routed(tokens: int, top_k: int, experts: int, device: str, id_dtype: torch.dtype = torch.int32) -> dict[str, Any]:
    """Return ids and weights of different experts for each token; routers of vLLM give int32 ids, some int64."""
    scores = torch.randn(tokens, experts, device=device).softmax(dim=-1)
    weights, ids = scores.topk(top_k, dim=-1)
    return {"topk_weights": weights / weights.sum(dim=-1, keepdim=True), "topk_ids": ids.to(id_dtype)}


def apply(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out_dtype: torch.dtype,
    quant_scales: list[torch.Tensor],
    *,
    biases: tuple[Optional[torch.Tensor], Optional[torch.Tensor]] = (None, None),
    constants: tuple[Optional[float], Optional[float], Optional[float]] = (None, None, None),
    activation: ActivationType = ActivationType.Swiglu,
    ranks: tuple[int, int, int, int] = (1, 0, 1, 0),
    block: bool = False,
    w4: bool = False,
) -> torch.Tensor:
    """Call with all of vLLM's keywords, into a buffer that is larger than the output."""
    vectors = [None if c is None else torch.full((w1.shape[0],), c, device=x.device) for c in constants]
    buffer = torch.full((x.shape[0] + 2, x.shape[1]), math.nan, dtype=out_dtype, device=x.device)
    output = buffer[: x.shape[0]]
    result = cutlass_fused_moe(
        input=x,
        token_selected_experts=topk_ids.to(torch.int),
        token_final_scales=topk_weights,
        fc1_expert_weights=w1,
        fc2_expert_weights=w2,
        fc1_expert_biases=biases[0],
        fc2_expert_biases=biases[1],
        swiglu_alpha=vectors[0],
        swiglu_beta=vectors[1],
        swiglu_limit=vectors[2],
        output=output,
        output_dtype=out_dtype,
        quant_scales=quant_scales,
        input_sf=None,
        tp_size=ranks[0],
        tp_rank=ranks[1],
        ep_size=ranks[2],
        ep_rank=ranks[3],
        activation_type=activation,
        use_deepseek_fp8_block_scale=block,
        use_mxfp8_act_scaling=False,
        use_w4_group_scaling=w4,
    )
    assert result[0] is output and buffer[x.shape[0] :].isnan().all()
    return output


def oai(alpha: float = 1.0, beta: float = 0.0, limit: float = INF) -> Callable[..., torch.Tensor]:
    """Return Swiglu of GPT-OSS; without constants it is that of other models."""

    def act(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + beta)

    return act


def model(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate: Optional[torch.Tensor],
    up: torch.Tensor,
    down: torch.Tensor,
    act: Callable[..., torch.Tensor],
    biases: tuple[Optional[torch.Tensor], ...] = (None, None, None),
    first: int = 0,
    rounds: Callable[[torch.Tensor], torch.Tensor] = lambda h: h,
) -> torch.Tensor:
    """Return the layer as its model defines it, in float32, slot by slot; without ``gate`` ``act`` takes ``up``."""
    out = torch.zeros(x.shape[0], down.shape[1], device=x.device)
    for token, slot in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(topk_ids.shape[1])).tolist():
        e = int(topk_ids[token, slot]) - first
        if not 0 <= e < down.shape[0]:
            continue
        b_gate, b_up, b_down = (0.0 if b is None else b[e].float() for b in biases)
        row = x[token].float()
        sums = [w[e].float() @ row + b for w, b in ((gate, b_gate), (up, b_up)) if w is not None]
        y = down[e].float() @ rounds(act(*sums)) + b_down
        out[token] += topk_weights[token, slot] * y
    return out


def close(out: torch.Tensor, expected: torch.Tensor, allowed: float) -> None:
    assert out.shape == expected.shape and out.isfinite().all()
    if out.numel():  # all zero on a rank whose experts no token has chosen
        error, largest = (out.float() - expected).abs().max().item(), expected.abs().max().item()
        assert error <= allowed * largest, f"{error:.4g} beside a largest result of {largest:.4g}"


def three(experts: int, inner: int, hidden: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return gate, up and down matrices."""
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return [(torch.randn(experts, n, k, device=device) / k**0.5).to(dtype) for n, k in shapes]


def halves_swapped(w13: torch.Tensor) -> torch.Tensor:
    """Return [up ; gate] of [gate ; up] as vLLM does: a copy through a view of four dimensions."""
    return w13.reshape(-1, 2, w13.shape[-2] // 2, w13.shape[-1]).flip(dims=[1]).reshape(w13.shape)


def in_a_parameter(x: torch.Tensor) -> torch.Tensor:
    """Return a weight as vLLM holds it: a subclass of Parameter with a ``__torch_function__`` of its own."""

    class Weight(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    return Weight(x, requires_grad=False)


def plain(dtype: torch.dtype) -> dict[str, Any]:
    return {"out_dtype": dtype, "quant_scales": []}
