# SPDX-License-Identifier: Apache-2.0
"""The split kernel "fused_moe": :class:`flashinfer.fused_moe.MoELayer` over the tokens that a transport delivered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Optional, Sequence, Union

import torch

from .._compat.tllm_enums import RoutingInputMode
from ..fused_moe.api import MoEActivationPack, MoEConfig, QuantVariant
from ..fused_moe.api import MoEWeightPack as PreparedWeights
from ..fused_moe.layer import MoELayer
from .config import BootstrapConfig, FleetParams
from .errors import MoEEpConfigError
from .kernels import SplitKernelBackend, SplitKernelContext, register_split_kernel
from .validation import bootstrap_ep_rank_world
from .weights import MoEWeightPack, PrequantizedMoEWeights

__all__ = [
    "FusedMoeKernelConfig",
    "build_activation_pack",
    "build_activation_pack_rank_major",
    "materialize_fused_moe_weights",
    "reshape_for_combine",
    "validate_compute_consistency",
]

Tensors = Union[torch.Tensor, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class FusedMoeKernelConfig:
    """Experts of a :class:`flashinfer.fused_moe.MoEConfig`, which must agree with the fleet."""

    moe_config: MoEConfig
    kernel_name: str = "fused_moe"


def _plain(op: str, tensors: Tensors, variant: QuantVariant, per_token: bool, scale: Any) -> torch.Tensor:
    """Return the tokens; backends of this machine take bfloat16 ones."""
    if variant not in (QuantVariant.BF16, QuantVariant.W4A16) or per_token or scale is not None:
        raise MoEEpConfigError(
            f"{op}: quant_variant must be BF16 or W4A16 without activation scales, got {QuantVariant(variant).name}"
        )
    return tensors if isinstance(tensors, torch.Tensor) else tensors[0]


def build_activation_pack(
    expert_tensors: Tensors,
    *,
    local_expert_offset: int = 0,
    quant_variant: QuantVariant,
    per_token_activation: bool = False,
    global_scale: Optional[torch.Tensor] = None,
) -> MoEActivationPack:
    """Return ``(experts, capacity, H)`` as a call with one expert of weight 1 per row: the exchange applies weights."""
    x = _plain("build_activation_pack", expert_tensors, quant_variant, per_token_activation, global_scale)
    experts, capacity, hidden = x.shape
    ids = torch.arange(experts, dtype=torch.int32, device=x.device).repeat_interleave(capacity).unsqueeze(1)
    return MoEActivationPack(
        x.reshape(-1, hidden),
        None,
        ids + local_expert_offset,
        torch.ones(experts * capacity, 1, device=x.device),
        routing_input_mode=RoutingInputMode.UnpackedPrecomputed,
    )


def build_activation_pack_rank_major(
    recv_tensors: Tensors,
    recv_topk_idx: torch.Tensor,
    recv_topk_weights: torch.Tensor,
    *,
    num_local_experts: int,
    local_expert_offset: int = 0,
    quant_variant: QuantVariant,
    per_token_activation: bool = False,
    global_scale: Optional[torch.Tensor] = None,
) -> MoEActivationPack:
    """Return received rows with their own experts; an id outside [0, num_local_experts) has weight 0."""
    x = _plain("build_activation_pack_rank_major", recv_tensors, quant_variant, per_token_activation, global_scale)
    ids, weights = recv_topk_idx.flatten(0, -2), recv_topk_weights.flatten(0, -2).float()
    is_here = (ids >= 0) & (ids < num_local_experts)
    return MoEActivationPack(
        x.reshape(-1, x.shape[-1]),
        None,
        (torch.where(is_here, ids, 0) + local_expert_offset).to(torch.int32),
        torch.where(is_here, weights, 0.0),
        routing_input_mode=RoutingInputMode.UnpackedPrecomputed,
    )


def reshape_for_combine(out_2d: torch.Tensor, dim0: int, dim1: int) -> torch.Tensor:
    """Return rows in the shape of the received tokens."""
    return out_2d.reshape(dim0, dim1, -1)


def validate_compute_consistency(
    fleet_params: FleetParams, bootstrap: BootstrapConfig, compute_config: MoEConfig
) -> None:
    """Check that the experts of a configuration are those of this rank."""
    rank, world = bootstrap_ep_rank_world(bootstrap)
    total, experts = compute_config.routing.num_experts, compute_config.experts
    local = fleet_params.num_experts // world
    wanted = (
        ("routing.num_experts", fleet_params.num_experts, total),
        ("experts.local_num_experts", local, total if experts.local_num_experts is None else experts.local_num_experts),
        ("experts.local_expert_offset", rank * local, experts.local_expert_offset),
        ("finalize.do_finalize", True, compute_config.finalize.do_finalize),
    )
    for what, expected, actual in wanted:
        if actual != expected:
            raise MoEEpConfigError(f"FusedMoeKernelConfig: {what} must be {expected} in this fleet, got {actual}")


def materialize_fused_moe_weights(weights: Any, moe_config: MoEConfig) -> PreparedWeights:
    """Return weights in the form of each configured backend; gate and up change places, as those backends want."""
    if not isinstance(weights, MoEWeightPack) or isinstance(weights, PrequantizedMoEWeights):
        raise MoEEpConfigError(
            f"FusedMoeKernelConfig: weights must be UnquantizedMoEWeights, got {type(weights).__name__}"
        )
    gate, up = weights.w13.chunk(2, 1)
    w1, prepared = torch.cat([up, gate], 1), PreparedWeights()
    sizes = {
        "num_local_experts": w1.shape[0],
        "hidden_size": w1.shape[2],
        "intermediate_size": moe_config.experts.intermediate_size,
    }
    for backend in moe_config.backend:
        if hasattr(backend, "prepare_weights"):
            prepared.prepare_for(backend.key, backend.prepare_weights(w1, weights.w2, **sizes))
    return prepared


@register_split_kernel("fused_moe")
class FusedMoeSplitKernelBackend(SplitKernelBackend):
    """Experts of :class:`FusedMoeKernelConfig`."""

    def __init__(self, config: FusedMoeKernelConfig) -> None:
        super().__init__(config)
        self._layer: Optional[MoELayer] = None
        self._weights: Optional[PreparedWeights] = None

    def prepare(self, weights: Any, bootstrap: BootstrapConfig, params: FleetParams) -> None:
        config: MoEConfig = self.config.moe_config
        validate_compute_consistency(params, bootstrap, config)
        world = bootstrap_ep_rank_world(bootstrap)[1]
        rows, routing = world * params.max_tokens_per_rank, config.routing
        if params.is_by_expert:
            rows, routing = rows * params.num_experts // world, replace(routing, top_k=1)
        limit = max(config.execution.tune_max_num_tokens, rows)
        execution = replace(config.execution, tune_max_num_tokens=limit)
        self._weights = materialize_fused_moe_weights(weights, config)
        self._layer = MoELayer(replace(config, routing=routing, execution=execution), weights.w13.device)

    def run(self, ctx: SplitKernelContext) -> Sequence[torch.Tensor]:
        if self._layer is None or self._weights is None:
            raise RuntimeError("FusedMoeKernelConfig: run must follow prepare, which MoEEpSplitLayer calls")
        config, received = self.config.moe_config, ctx.expert_tensors[0]
        given = {"local_expert_offset": config.experts.local_expert_offset, "quant_variant": config.quant.variant}
        if ctx.fleet_params.is_by_expert:
            pack = build_activation_pack(received, **given)
        else:
            assert ctx.recv_topk_idx is not None and ctx.recv_topk_weights is not None
            local = config.experts.local_num_experts or config.routing.num_experts
            pack = build_activation_pack_rank_major(
                received, ctx.recv_topk_idx, ctx.recv_topk_weights, num_local_experts=local, **given
            )
        out = self._layer(pack, self._weights)
        return [reshape_for_combine(out, *received.shape[:2]) if received.dim() == 3 else out]
