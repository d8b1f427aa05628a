# SPDX-License-Identifier: Apache-2.0
"""Checks of expert-parallel layers that need no GPU and no other rank."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Union

import torch

from .algo_knobs import FleetAlgoKnobFaultTolerance, QuantType
from .config import BootstrapConfig, EpAlgorithm, EpLayout, FleetParams
from .errors import MoEEpArchError, MoEEpConfigError
from .weights import MoEWeightPack

__all__ = [
    "bootstrap_comm_group",
    "bootstrap_ep_rank_world",
    "bootstrap_ep_world_size",
    "ensure_bootstrap_dist_validated",
    "validate_arch_for_backend",
    "validate_bootstrap_process_group_ready",
    "validate_bootstrap_world_size",
    "validate_fleet_params",
    "validate_fleet_weights",
    "validate_mega_arch",
    "validate_mega_arch_sm90",
    "validate_mega_fleet_params",
    "validate_mega_forward_inputs",
    "validate_split_forward_inputs",
]

_NIXL_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
_NIXL_TOKENS = 1024


def _local_experts(op: str, params: FleetParams, world_size: int) -> int:
    if params.num_experts % world_size:
        raise MoEEpConfigError(
            f"{op}: num_experts must be divisible by world_size = {world_size}, got {params.num_experts}"
        )
    return params.num_experts // world_size


def validate_fleet_weights(weights: Any, params: FleetParams, world_size: int) -> None:
    """Check the weights of a rank: experts, and hidden size (halved where two codes share a byte)."""
    op = "validate_fleet_weights"
    local = _local_experts(op, params, world_size)
    if not isinstance(weights, MoEWeightPack):
        raise MoEEpConfigError(f"{op}: weights must be a MoEWeightPack, got {type(weights).__name__}")
    hidden = params.token_hidden_size
    for name, tensor, dim in (("w13", weights.w13, -1), ("w2", weights.w2, 1)):
        if tensor.dim() != 3 or tensor.shape[0] != local:
            raise MoEEpConfigError(
                f"{op}: {name} must have 3 dimensions, the first num_experts / world_size = {local}, got "
                f"{tuple(tensor.shape)}"
            )
        if tensor.shape[dim] not in (hidden, hidden // 2):
            raise MoEEpConfigError(
                f"{op}: {name}.shape[{dim}] must be token_hidden_size = {hidden} or half of it, got {tensor.shape[dim]}"
            )


def validate_mega_fleet_params(
    params: FleetParams, world_size: int, *, intermediate_size: int, top_k: int, alignment: int = 128
) -> None:
    """Check the sizes of a layer in one kernel."""
    op = "validate_mega_fleet_params"
    _local_experts(op, params, world_size)
    for name, size in (("token_hidden_size", params.token_hidden_size), ("intermediate_size", intermediate_size)):
        if size <= 0 or size % alignment:
            raise MoEEpConfigError(f"{op}: {name} must be a positive multiple of {alignment}, got {size}")
    if top_k <= 0:
        raise MoEEpConfigError(f"{op}: top_k must be positive, got {top_k}")


def _validate_forward(
    op: str, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, params: FleetParams
) -> None:
    if hidden.dim() != 2 or hidden.shape[1] not in (params.token_hidden_size, params.token_hidden_size // 2):
        raise MoEEpConfigError(
            f"{op}: hidden_states must be (num_tokens, {params.token_hidden_size}), got {tuple(hidden.shape)}"
        )
    if hidden.shape[0] > params.max_tokens_per_rank:
        raise MoEEpConfigError(
            f"{op}: number of tokens {hidden.shape[0]} exceeds max_tokens_per_rank = {params.max_tokens_per_rank}"
        )
    if ids.dim() != 2 or ids.shape[0] != hidden.shape[0]:
        raise MoEEpConfigError(f"{op}: topk_ids must be ({hidden.shape[0]}, top_k), got {tuple(ids.shape)}")
    if weights.shape != ids.shape:
        raise MoEEpConfigError(
            f"{op}: topk_weights must have the shape of topk_ids, {tuple(ids.shape)}, got {tuple(weights.shape)}"
        )


def validate_split_forward_inputs(
    hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, fleet_params: FleetParams
) -> None:
    """Check the tensors of a call of a layer in stages."""
    _validate_forward("validate_split_forward_inputs", hidden_states, topk_ids, topk_weights, fleet_params)


def validate_mega_forward_inputs(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    fleet_params: FleetParams,
    *,
    top_k: int,
    quantize_input: bool,
    scales: Optional[torch.Tensor] = None,
) -> None:
    """Check the tensors of a call of a layer in one kernel."""
    op = "validate_mega_forward_inputs"
    _validate_forward(op, hidden_states, topk_ids, topk_weights, fleet_params)
    if topk_ids.shape[1] != top_k:
        raise MoEEpConfigError(f"{op}: topk_ids must have top_k = {top_k} columns, got {topk_ids.shape[1]}")
    if not quantize_input and scales is None:
        raise MoEEpConfigError(f"{op}: scales must be a tensor with quantize_input=False, got None")


def validate_fleet_params(
    params: FleetParams,
    backend: str,
    world_size: int,
    quant: Union[QuantType, Sequence[QuantType], None] = None,
    topology_capacity: Optional[int] = None,
    fault_tolerance: Optional[FleetAlgoKnobFaultTolerance] = None,
) -> None:
    """Check what a transport can exchange."""
    op = "validate_fleet_params"
    if fault_tolerance is not None and fault_tolerance.enabled and params.algorithm != EpAlgorithm.LOW_LATENCY:
        raise MoEEpConfigError(
            f"{op}: algorithm must be LOW_LATENCY with fault tolerance, got {EpAlgorithm(params.algorithm).name}"
        )
    if backend != "nixl_ep":
        return
    if params.algorithm != EpAlgorithm.LOW_LATENCY or params.layout != EpLayout.EXPERT_MAJOR:
        raise MoEEpConfigError(
            f"{op}: algorithm and layout must be LOW_LATENCY and EXPERT_MAJOR with nixl_ep, got "
            f"{EpAlgorithm(params.algorithm).name} and {EpLayout(params.layout).name}"
        )
    capacity = world_size if topology_capacity is None else topology_capacity
    if capacity <= 0 or capacity < world_size or params.num_experts % capacity:
        raise MoEEpConfigError(
            f"{op}: topology_capacity must be positive, at least world_size = {world_size} and divide num_experts = "
            f"{params.num_experts}, got {capacity}"
        )
    if params.max_tokens_per_rank > _NIXL_TOKENS:
        raise MoEEpConfigError(
            f"{op}: max_tokens_per_rank must be at most {_NIXL_TOKENS} with nixl_ep, got {params.max_tokens_per_rank}"
        )
    if params.token_hidden_size not in _NIXL_HIDDEN:
        raise MoEEpConfigError(
            f"{op}: token_hidden_size must be one of {_NIXL_HIDDEN} with nixl_ep, got {params.token_hidden_size}"
        )
    quants = (quant,) if isinstance(quant, QuantType) else tuple(quant or ())
    if QuantType.UE8M0 in quants and torch.cuda.is_available() and torch.cuda.get_device_capability() < (10, 0):
        major, minor = torch.cuda.get_device_capability()
        raise MoEEpArchError(f"{op}: quant must not be UE8M0 before SM100, got SM{major}{minor}")


def _capability() -> Optional[tuple[int, int]]:
    """Return the capability of the current GPU; None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def validate_arch_for_backend(backend: str) -> None:
    """Check that a transport runs on this GPU with this torch; there is nothing to check without a GPU."""
    found = _capability()
    if found is None:
        return
    if (torch.version.cuda or "").split(".")[0] == "12":
        raise MoEEpConfigError(f"{backend}: requires CUDA 13, got torch for CUDA {torch.version.cuda}")
    if found < (9, 0):
        raise MoEEpArchError(f"{backend}: requires sm_90+, got sm_{found[0]}{found[1]}")


def validate_mega_arch() -> None:
    """Check that kernels of Blackwell run on this GPU; there is nothing to check without a GPU."""
    found = _capability()
    if found is not None and found < (10, 0):
        raise MoEEpArchError(f"mega kernel: requires sm_100+, got sm_{found[0]}{found[1]}")


def validate_mega_arch_sm90() -> None:
    """Check that kernels of Hopper run on this GPU; there is nothing to check without a GPU."""
    found = _capability()
    if found is not None and found != (9, 0):
        raise MoEEpArchError(f"mega kernel: requires sm_90, got sm_{found[0]}{found[1]}")


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def validate_bootstrap_process_group_ready(bootstrap: BootstrapConfig) -> None:
    """Check that torch.distributed runs if a process group is given."""
    if bootstrap.process_group is not None and not _is_distributed():
        raise MoEEpConfigError("bootstrap: process_group must be None while torch.distributed is down, got a group")


def validate_bootstrap_world_size(bootstrap: BootstrapConfig) -> None:
    """Check that world size and rank are those of the process group."""
    validate_bootstrap_process_group_ready(bootstrap)
    if not _is_distributed():
        return
    group = bootstrap.process_group
    found = (torch.distributed.get_world_size(group), torch.distributed.get_rank(group))
    if found != (bootstrap.world_size, bootstrap.rank):
        raise MoEEpConfigError(
            f"bootstrap: world_size and rank must match those of the process group, {found}, got "
            f"{(bootstrap.world_size, bootstrap.rank)}"
        )


def ensure_bootstrap_dist_validated(bootstrap: BootstrapConfig) -> None:
    """Make both checks; any number of times."""
    validate_bootstrap_process_group_ready(bootstrap)
    validate_bootstrap_world_size(bootstrap)


def bootstrap_comm_group(bootstrap: BootstrapConfig) -> Any:
    """Return the given process group, else that of all ranks."""
    if bootstrap.process_group is not None:
        return bootstrap.process_group
    if not _is_distributed():
        raise RuntimeError("bootstrap_comm_group: torch.distributed must be initialised, got none")
    return torch.distributed.group.WORLD


def bootstrap_ep_rank_world(bootstrap: BootstrapConfig) -> tuple[int, int]:
    """Return rank and world size of the group; those of the configuration while torch.distributed is down."""
    if not _is_distributed():
        return bootstrap.rank, bootstrap.world_size
    group = bootstrap_comm_group(bootstrap)
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def bootstrap_ep_world_size(bootstrap: BootstrapConfig) -> int:
    """Return the world size of :func:`bootstrap_ep_rank_world`."""
    return bootstrap_ep_rank_world(bootstrap)[1]
