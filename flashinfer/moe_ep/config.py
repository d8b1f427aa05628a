# SPDX-License-Identifier: Apache-2.0
"""Data classes of expert-parallel layers: the group of ranks, the sizes, the tensors of a call and of its stages."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Sequence, Union

import torch

__all__ = [
    "BootstrapConfig",
    "CombineInputParams",
    "CombineOutput",
    "DispatchInputParams",
    "DispatchOutput",
    "EpAlgorithm",
    "EpLayout",
    "FleetParams",
    "HandleParams",
    "MoEEpTensors",
]


class EpAlgorithm(enum.IntEnum):
    """Purpose of an exchange: few tokens, or many."""

    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class EpLayout(enum.IntEnum):
    """Order of received tokens: by expert, or by the rank that they come from."""

    EXPERT_MAJOR = 1
    RANK_MAJOR = 2


@dataclass(frozen=True)
class BootstrapConfig:
    """The group of ranks, and this rank's place in it."""

    world_size: int
    rank: int
    stream: int = 0
    auto_bootstrap: bool = True
    device: Optional[int] = field(default=None, kw_only=True)
    nccl_comm: Any = None
    process_group: Any = field(default=None, compare=False, hash=False)
    tcp_store: Any = None

    def __post_init__(self) -> None:
        if self.world_size <= 0:
            raise ValueError(f"BootstrapConfig: world_size must be positive, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"BootstrapConfig: rank {self.rank} not in [0, world_size), got world_size {self.world_size}"
            )
        if self.device is not None and not isinstance(self.device, int):
            raise ValueError(f"BootstrapConfig: device must be the index of a GPU or None, got {self.device!r}")
        if self.device is not None and self.device < 0:
            raise ValueError(f"BootstrapConfig: device must be at least 0, got {self.device}")


@dataclass(frozen=True)
class FleetParams:
    """Sizes of what ranks exchange."""

    num_experts: int
    max_tokens_per_rank: int
    token_hidden_size: int
    dtype_bytes: int = 2
    algorithm: EpAlgorithm = EpAlgorithm.LOW_LATENCY
    layout: EpLayout = EpLayout.EXPERT_MAJOR

    def __post_init__(self) -> None:
        for name in ("num_experts", "max_tokens_per_rank", "token_hidden_size", "dtype_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"FleetParams: {name} must be positive, got {getattr(self, name)}")
        if self.layout == EpLayout.RANK_MAJOR and self.algorithm != EpAlgorithm.LOW_LATENCY:
            raise ValueError(
                f"FleetParams: layout must not be RANK_MAJOR without LOW_LATENCY, got "
                f"{EpAlgorithm(self.algorithm).name}"
            )

    @property
    def is_by_expert(self) -> bool:
        """Return True if a rank receives tokens sorted by expert: the place of a row tells its only expert."""
        return self.algorithm == EpAlgorithm.LOW_LATENCY and self.layout == EpLayout.EXPERT_MAJOR


@dataclass(frozen=True, eq=False)
class HandleParams:
    """The experts of a call's tokens."""

    topk_ids: torch.Tensor


@dataclass(frozen=True, eq=False)
class DispatchInputParams:
    """Tensors to send: rows of tokens, then their scales if there are any."""

    x: Sequence[torch.Tensor]


@dataclass(frozen=True, eq=False)
class DispatchOutput:
    """Received tokens; their number may be known on the device only, so that it is asked for by a call."""

    expert_tensors: Sequence[torch.Tensor]
    num_tokens: Union[int, Callable[[], int]]
    recv_topk_idx: Optional[torch.Tensor] = None
    recv_topk_weights: Optional[torch.Tensor] = None
    expert_counts: Optional[torch.Tensor] = None
    recv_total_counter: Optional[torch.Tensor] = None
    expert_scales: Optional[torch.Tensor] = None

    def get_num_tokens(self) -> int:
        """Return the number of received tokens."""
        return self.num_tokens() if callable(self.num_tokens) else self.num_tokens


@dataclass(frozen=True, eq=False)
class CombineInputParams:
    """Tensors to send back, and the buffer of the sums."""

    x: Sequence[torch.Tensor]
    out: Optional[torch.Tensor] = None


@dataclass(frozen=True, eq=False)
class CombineOutput:
    """Sums over the experts of each token."""

    x: torch.Tensor


@dataclass(eq=False)
class MoEEpTensors:
    """Tensors of a call of a layer."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    scales: Optional[torch.Tensor] = None
    fc1_alpha: Optional[torch.Tensor] = None
    fc2_alpha: Optional[torch.Tensor] = None
    fc1_norm_const: Optional[torch.Tensor] = None
    recv_count: Optional[torch.Tensor] = None
    num_tokens_per_expert: Optional[torch.Tensor] = None

    @property
    def num_tokens(self) -> int:
        return self.hidden_states.shape[0]
