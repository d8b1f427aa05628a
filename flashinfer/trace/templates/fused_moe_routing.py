# SPDX-License-Identifier: Apache-2.0
"""Templates and references of routing: ``fused_topk_deepseek``, ``hash_topk`` and ``route_tokens``."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..check import default_check
from ..notation import template_of_text
from .shared import normal, randint, seeded

__all__ = ["fused_topk_deepseek_trace", "hash_topk_trace", "route_tokens_trace"]


def _best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Columns of the k largest numbers of each row; the smaller column among equals."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]


def _of_best_groups(scores: torch.Tensor, n_group: int, topk_group: int) -> torch.Tensor:
    """Scores with minus infinity outside of the groups whose two best experts have the largest sum."""
    groups = scores.unflatten(1, (n_group, -1))
    best = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(dim=2)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best(best, topk_group), True)
    return groups.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)


def _fused_topk_deepseek_reference(
    scores: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    s = scores.float().sigmoid()
    b = s + bias.float()
    if n_group > 1:
        b = _of_best_groups(b, n_group, topk_group)
    experts = _best(b, topk)
    chosen = s.gather(1, experts)
    weights = chosen / (chosen.sum(dim=1, keepdim=True) + 1e-20) * routed_scaling_factor
    return weights.to(scores.dtype), experts.int()


def _route_tokens_reference(
    logits: torch.Tensor,
    top_k: int,
    method: int = 0,
    bias: Optional[torch.Tensor] = None,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of methods are those of RoutingMethodType."""
    x = logits.float()
    p, s = x.softmax(dim=1), x.sigmoid()
    b = s if bias is None else s + bias.float()
    if method == 2 and n_group > 1:
        b = _of_best_groups(b, n_group, topk_group)
    by = {0: p, 1: x, 2: b, 3: x, 4: p, 5: x, 6: s, 7: b, 8: s, 9: x}[int(method)]
    experts = _best(by, top_k)
    value = {0: p, 1: x, 2: s, 3: s, 4: p, 5: x, 6: s, 7: s, 8: s, 9: s}[int(method)].gather(1, experts)
    if method == 1:
        value = value.softmax(dim=1)
    elif method in (2, 4, 6, 7):
        factor = routed_scaling_factor if method in (2, 7) else 1.0
        value = value / (value.sum(dim=1, keepdim=True) + 1e-20) * factor
    return value, experts.int()


def _hash_topk_reference(
    router_logits: torch.Tensor,
    input_ids: torch.Tensor,
    tid2eid: torch.Tensor,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = tid2eid[input_ids]
    weights = torch.nn.functional.softplus(router_logits.gather(1, ids.long())).sqrt()
    weights = weights / weights.sum(dim=1, keepdim=True)
    if num_fused_shared_experts:
        shared = ids.new_full((len(ids), 1), router_logits.shape[1])
        ids = torch.cat([ids, shared], 1)
        weights = torch.cat([weights, weights.new_full((len(ids), 1), 1 / routed_scaling_factor)], 1)
    return weights, ids


def _by_expert(outputs: Any) -> Any:
    """Weights and experts by ascending number of the expert: the order of slots is not part of the interface."""
    weights, experts = outputs.values() if isinstance(outputs, dict) else outputs
    if experts.is_floating_point():
        return outputs
    experts, order = experts.sort(dim=1)
    return weights.gather(1, order), experts


def _routing_check(reference_outputs: Any, actual_outputs: Any, **tolerances: Any) -> bool:
    return default_check(_by_expert(reference_outputs), _by_expert(actual_outputs), **tolerances)


def _fused_topk_deepseek_init(
    *, num_tokens: int, num_experts: int = 256, topk: int = 8, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "scores": normal(g, num_tokens, num_experts, dtype=torch.float32),
        "bias": normal(g, num_experts, dtype=torch.float32) * 0.1,
        "n_group": 8,
        "topk_group": 4,
        "topk": topk,
        "routed_scaling_factor": 2.5,
        "topk_values": torch.zeros(num_tokens, topk, device=device),
        "topk_indices": torch.zeros(num_tokens, topk, dtype=torch.int32, device=device),
    }


def _route_tokens_init(
    *, num_tokens: int, num_experts: int = 128, top_k: int = 8, device: Any = "cuda", seed: int = 0
) -> dict[str, Any]:
    return {"logits": normal(seeded(seed, device), num_tokens, num_experts, dtype=torch.float32), "top_k": top_k}


def _hash_topk_init(
    *,
    num_tokens: int,
    num_experts: int = 256,
    vocab_size: int = 1024,
    topk: int = 6,
    num_chosen: int = 0,
    device: Any = "cuda",
    seed: int = 0,
) -> dict[str, Any]:
    g = seeded(seed, device)
    return {
        "router_logits": normal(g, num_tokens, num_experts, dtype=torch.float32),
        "input_ids": randint(g, vocab_size, num_tokens).long(),
        "tid2eid": randint(g, num_experts, vocab_size, topk),
    }


fused_topk_deepseek_trace = template_of_text(
    "fused_topk_deepseek_e{num_experts}_k{topk}",
    "moe_routing",
    var="num_tokens",
    inputs="scores[num_tokens, num_experts]; bias[num_experts]; n_group:int32; topk_group:int32; topk:int32;"
    "routed_scaling_factor:float32",
    outputs="weights[num_tokens, topk]<-topk_values=scores; experts[num_tokens, topk]<-topk_indices:int32",
    notes={"scores": "router logits", "bias": "added to the sigmoid for the choice only"},
    reference=_fused_topk_deepseek_reference,
    check=_routing_check,
    init=_fused_topk_deepseek_init,
    description="Experts of the best groups by sigmoid and bias; normalised sigmoids as weights.",
)

route_tokens_trace = template_of_text(
    "route_tokens_e{num_experts}_k{top_k}",
    "moe_routing",
    var="num_tokens",
    inputs="logits[num_tokens, num_experts]; top_k:int32; method:int32?; bias[num_experts]:float32?; n_group:int32?;"
    "topk_group:int32?; routed_scaling_factor:float32?",
    outputs="weights[num_tokens, top_k]:float32; experts[num_tokens, top_k]:int32",
    notes={"logits": "router logits", "method": "RoutingMethodType"},
    reference=_route_tokens_reference,
    check=_routing_check,
    init=_route_tokens_init,
    description="Experts of each token and their weights, by a routing method.",
)

hash_topk_trace = template_of_text(
    "hash_topk_e{num_experts}_k{topk}",
    "moe_routing",
    var="num_tokens vocab_size num_chosen",
    inputs="router_logits[num_tokens, num_experts]; input_ids[num_tokens]; tid2eid[vocab_size, topk];"
    "num_fused_shared_experts:int32?; routed_scaling_factor:float32?",
    outputs="weights[num_tokens, num_chosen]:float32; experts[num_tokens, num_chosen]:int32",
    notes={"tid2eid": "experts of each token of the vocabulary"},
    reference=_hash_topk_reference,
    init=_hash_topk_init,
    description="Experts from a table; square roots of softplus, normalised, as weights.",
)
