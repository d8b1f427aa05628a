# SPDX-License-Identifier: Apache-2.0
"""Routing of a mixture-of-experts layer: the experts of each token and their weights."""

from __future__ import annotations

import math
from typing import Optional

import torch

from .._runtime.allocation import new_empty
from .._runtime.dispatch import NativeFunction, use_pdl
from .._runtime.errors import ArgumentError
from .._runtime.torch_ops import called, register_custom_op
from ..api_logging import flashinfer_api
from ..jit.fused_moe.routing import get_moe_routing_module
from ..tllm_enums import RoutingMethodType
from ..trace.templates.fused_moe_routing import fused_topk_deepseek_trace, hash_topk_trace, route_tokens_trace
from .dispatch import block_tokens

__all__ = ["fused_topk_deepseek", "hash_topk", "route_tokens"]

_native_route = NativeFunction(get_moe_routing_module, "moe_route")
_native_hash_topk = NativeFunction(get_moe_routing_module, "hash_topk")

# MoeScore and MoeWeight of moe/route.h
_LOGIT, _SOFTMAX, _SIGMOID = 0, 1, 2
_SCORE, _NORMALIZED, _SOFTMAX_OF_CHOSEN, _SIGMOID_OF_LOGIT = 0, 1, 2, 3
_METHODS = {
    RoutingMethodType.Default: (_SOFTMAX, _SCORE),
    RoutingMethodType.Renormalize: (_LOGIT, _SOFTMAX_OF_CHOSEN),
    RoutingMethodType.DeepSeekV3: (_SIGMOID, _NORMALIZED),
    RoutingMethodType.Llama4: (_LOGIT, _SIGMOID_OF_LOGIT),
    RoutingMethodType.RenormalizeNaive: (_SOFTMAX, _NORMALIZED),
    RoutingMethodType.TopK: (_LOGIT, _SCORE),
    RoutingMethodType.SigmoidRenorm: (_SIGMOID, _NORMALIZED),
    RoutingMethodType.MiniMax2: (_SIGMOID, _NORMALIZED),
    RoutingMethodType.Sigmoid: (_SIGMOID, _SCORE),
    RoutingMethodType.TopKSigmoid: (_LOGIT, _SIGMOID_OF_LOGIT),
}
_WITH_BIAS = (RoutingMethodType.DeepSeekV3, RoutingMethodType.MiniMax2)


@register_custom_op("flashinfer::moe_route", mutates_args=("weights", "experts", "replay"))
@called("moe_route")
def _route(
    weights: torch.Tensor,
    experts: torch.Tensor,
    replay: Optional[torch.Tensor],
    logits: torch.Tensor,
    bias: Optional[torch.Tensor],
    groups: int,
    top_groups: int,
    score: int,
    weight: int,
    factor: float,
    enable_pdl: bool,
    is_deepseek: bool,
) -> None:
    _native_route[logits.is_cuda](
        *(weights, experts, replay, logits, bias, groups, top_groups, score, weight, factor, enable_pdl, is_deepseek),
        block_tokens(),
    )


@register_custom_op("flashinfer::hash_topk", mutates_args=("weights", "experts"))
@called("hash_topk")
def _hash_topk(
    weights: torch.Tensor,
    experts: torch.Tensor,
    router_logits: torch.Tensor,
    input_ids: torch.Tensor,
    tid2eid: torch.Tensor,
    factor: float,
    enable_pdl: bool,
) -> None:
    _native_hash_topk[router_logits.is_cuda](weights, experts, router_logits, input_ids, tid2eid, factor, enable_pdl)


def _check_deepseek(experts: int, n_group: int, topk_group: int, topk: int) -> None:
    """Raise for configurations that callers must not rely on: the published kernel refuses them."""
    op, size = "fused_topk_deepseek: Invalid configuration", experts // max(n_group, 1)
    if n_group < 1 or experts % n_group or not 1 <= topk_group <= n_group or topk < 1:
        raise ArgumentError(
            f"{op}: topk_group must be from 1 to n_group, which divides the experts, got topk_group {topk_group}, "
            f"n_group {n_group}, {experts} experts and topk {topk}"
        )
    if (n_group > 1 and topk_group * n_group < topk) or topk > topk_group * size:
        raise ArgumentError(
            f"{op}: topk must be at most topk_group * n_group and the experts of topk_group groups, got {topk} with "
            f"topk_group {topk_group}, n_group {n_group} and {experts} experts"
        )
    if n_group > 1 and (topk > 8 or size > 32 or size * topk_group > 128):
        raise ArgumentError(
            f"{op}: topk must be at most 8, groups at most 32 experts and topk_group groups at most 128, got {topk}, "
            f"{size} and {size * topk_group}"
        )
    if n_group == 1 and (experts > 384 or topk > 8):
        raise ArgumentError(f"{op}: there must be at most 384 experts and topk 8, got {experts} and {topk}")


@flashinfer_api(trace=fused_topk_deepseek_trace)
def fused_topk_deepseek(
    scores: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: torch.Tensor,
    topk_indices: torch.Tensor,
    launch_with_pdl: bool = True,
    routing_replay_out: Optional[torch.Tensor] = None,
    *,
    backend: str = "default",
) -> None:
    r"""Choose experts as DeepSeek V3 does: by sigmoid and bias, from the best groups.

    With ``s = sigmoid(scores)`` and ``b = s + bias`` in float32, a group counts as the sum of its two largest ``b``. Of
    the ``topk_group`` best groups the ``topk`` experts with the largest ``b`` are chosen; the weight of an expert is
    ``s / (sum of s over the chosen + 1e-20) * routed_scaling_factor``. Ties go to the smaller number.

    Parameters
    ----------
    scores : torch.Tensor
        ``(num_tokens, num_experts)`` router logits: float32, float16 or bfloat16.
    bias : torch.Tensor
        ``(num_experts,)``, any of the three dtypes.
    n_group, topk_group, topk : int
        Groups, groups to choose from, and experts to choose.
    routed_scaling_factor : float
        Factor of the weights.
    topk_values : torch.Tensor
        ``(num_tokens, topk)``: receives the weights. The dtype of ``scores``, or float32.
    topk_indices : torch.Tensor
        ``(num_tokens, topk)`` int32: receives the experts.
    launch_with_pdl : bool
        Whether the kernel may start before the kernel before it has ended.
    routing_replay_out : Optional[torch.Tensor]
        ``(at least num_tokens, topk)`` int16: receives the experts too.
    backend : str
        ``"default"``; ``"cake"`` needs a Blackwell GPU.

    Examples
    --------
    >>> scores, bias = torch.randn(3, 64), torch.zeros(64)
    >>> weights, experts = torch.empty(3, 4), torch.empty(3, 4, dtype=torch.int32)
    >>> flashinfer.fused_moe.fused_topk_deepseek(scores, bias, 8, 4, 4, 1.0, weights, experts)
    >>> torch.allclose(weights.sum(1), torch.ones(3))
    True
    """
    if backend != "default":
        raise ArgumentError(f"fused_topk_deepseek: backend must be 'default' on this device, got {backend!r}")
    _check_deepseek(scores.shape[-1], n_group, topk_group, topk)
    if topk_values.shape[-1] != topk or topk_indices.shape[-1] != topk:
        raise ArgumentError(
            f"fused_topk_deepseek: topk_values and topk_indices must have topk = {topk} columns, got "
            f"{topk_values.shape[-1]} and {topk_indices.shape[-1]}"
        )
    if routing_replay_out is not None:
        _check_replay(routing_replay_out, scores.shape[0], topk)
    pdl = use_pdl(scores, bool(launch_with_pdl))
    factor = float(routed_scaling_factor)
    _route(
        topk_values,
        topk_indices,
        routing_replay_out,
        scores,
        bias,
        n_group,
        topk_group,
        _SIGMOID,
        _NORMALIZED,
        factor,
        pdl,
        True,
    )


def _check_replay(replay: torch.Tensor, tokens: int, topk: int) -> None:
    op = "fused_topk_deepseek"
    if replay.dtype != torch.int16:
        raise ArgumentError(f"{op}: routing_replay_out must be int16, got {replay.dtype}")
    if replay.dim() != 2 or replay.shape[0] < tokens or replay.shape[1] != topk:
        raise ArgumentError(
            f"{op}: routing_replay_out must have at least {tokens} rows and {topk} columns, got {tuple(replay.shape)}"
        )


@flashinfer_api(trace=route_tokens_trace)
def route_tokens(
    logits: torch.Tensor,
    top_k: int,
    method: RoutingMethodType = RoutingMethodType.Default,
    bias: Optional[torch.Tensor] = None,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
    enable_pdl: Optional[bool] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Choose the experts of each token by one of the methods of :class:`flashinfer.RoutingMethodType`.

    Parameters
    ----------
    logits : torch.Tensor
        ``(num_tokens, num_experts)``: float32, float16 or bfloat16; at most 1024 experts.
    top_k : int
        Experts to choose, at most 32.
    method : RoutingMethodType
        What experts are compared by, and their weights.
    bias : Optional[torch.Tensor]
        ``(num_experts,)``, added to the score for the comparison: ``DeepSeekV3`` and ``MiniMax2`` only.
    n_group, topk_group : int
        Groups and groups to choose from: ``DeepSeekV3`` only. The chosen groups must have ``top_k`` experts.
    routed_scaling_factor : float
        Factor of the weights: ``DeepSeekV3`` and ``MiniMax2`` only.
    enable_pdl : Optional[bool]
        Whether the kernel may start before the kernel before it has ended; None: as the device supports it.

    Returns
    -------
    tuple
        Weights ``(num_tokens, top_k)`` float32 and experts ``(num_tokens, top_k)`` int32, by descending score; among
        equal scores the smaller number comes first.

    Examples
    --------
    >>> from flashinfer.fused_moe import RoutingMethodType, route_tokens
    >>> weights, experts = route_tokens(torch.randn(4, 64), 8, RoutingMethodType.Renormalize)
    """
    if method not in _METHODS:
        raise ArgumentError(f"route_tokens: method must be a RoutingMethodType with a rule, got {method!r}")
    method = RoutingMethodType(method)
    if top_k < 1:
        raise ArgumentError(f"route_tokens: top_k must be at least 1, got {top_k}")
    if method == RoutingMethodType.Llama4 and top_k != 1:
        raise ArgumentError(f"route_tokens: top_k must be 1 for Llama4, got {top_k}")
    if method not in _WITH_BIAS and (bias is not None or routed_scaling_factor != 1.0):
        raise ArgumentError(
            f"route_tokens: method must be DeepSeekV3 or MiniMax2 with a bias or a routed_scaling_factor, got "
            f"{method.name}"
        )
    if method != RoutingMethodType.DeepSeekV3 and n_group != 1:
        raise ArgumentError(f"route_tokens: n_group must be 1 but for DeepSeekV3, got {n_group} with {method.name}")
    weights = new_empty(logits, torch.float32, logits.shape[0], top_k)
    experts = new_empty(logits, torch.int32, logits.shape[0], top_k)
    score, weight = _METHODS[method]
    pdl, factor = use_pdl(logits, enable_pdl), float(routed_scaling_factor)
    _route(weights, experts, None, logits, bias, n_group, topk_group, score, weight, factor, pdl, False)
    return weights, experts


@flashinfer_api(trace=hash_topk_trace)
def hash_topk(
    router_logits: torch.Tensor,
    input_ids: torch.Tensor,
    tid2eid: torch.Tensor,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    launch_with_pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Take the experts of each token from a table; weights are ``sqrt(softplus(logit))``, normalised over the experts.

    Parameters
    ----------
    router_logits : torch.Tensor
        ``(num_tokens, num_experts)`` float32, contiguous.
    input_ids : torch.Tensor
        ``(num_tokens,)`` int64: numbers of tokens in the vocabulary.
    tid2eid : torch.Tensor
        ``(vocab_size, topk)`` int32: experts of each token of the vocabulary.
    num_fused_shared_experts : int
        0 or 1: whether a slot with expert ``num_experts`` and weight ``1 / routed_scaling_factor`` follows.
    routed_scaling_factor : float
        Used with a shared expert only: positive and finite.
    launch_with_pdl : bool
        Whether the kernel may start before the kernel before it has ended.

    Returns
    -------
    tuple
        Weights float32 and experts int32, both ``(num_tokens, topk + num_fused_shared_experts)``.

    Examples
    --------
    >>> logits, table = torch.zeros(2, 8), torch.tensor([[0, 1], [2, 3], [4, 5]]).int()
    >>> weights, experts = flashinfer.fused_moe.hash_topk(logits, torch.tensor([2, 0]), table)
    >>> experts.tolist(), weights.tolist()
    ([[4, 5], [0, 1]], [[0.5, 0.5], [0.5, 0.5]])
    """
    shared, factor = num_fused_shared_experts, float(routed_scaling_factor)
    if tid2eid.dim() != 2 or shared not in (0, 1) or not 1 <= tid2eid.shape[-1] + shared <= 32:
        raise ArgumentError(
            f"hash_topk: tid2eid must be (vocab_size, topk) with topk + num_fused_shared_experts (0 or 1) at most 32, "
            f"got {tuple(tid2eid.shape)} and {shared}"
        )
    if shared and not (factor > 0 and math.isfinite(factor)):
        raise ArgumentError(f"hash_topk: routed_scaling_factor must be positive and finite, got {factor}")
    if router_logits.dim() != 2:
        raise ArgumentError(f"hash_topk: router_logits must have 2 dimensions, got {router_logits.dim()}")
    slots = tid2eid.shape[1] + shared
    weights = new_empty(router_logits, torch.float32, router_logits.shape[0], slots)
    experts = new_empty(router_logits, torch.int32, router_logits.shape[0], slots)
    pdl = use_pdl(router_logits, bool(launch_with_pdl))
    _hash_topk(weights, experts, router_logits, input_ids, tid2eid, factor, pdl)
    return weights, experts
