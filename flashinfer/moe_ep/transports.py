# SPDX-License-Identifier: Apache-2.0
"""Transports by name: that of a single rank, and those whose packages this package has no adapter for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Sequence

import torch

from .algo_knobs import AlgoKnob, HandleAlgoKnobNumReceivedTokens, HandleAlgoKnobTopKWeights, _index_knobs
from .config import (
    BootstrapConfig,
    CombineInputParams,
    CombineOutput,
    DispatchInputParams,
    DispatchOutput,
    EpLayout,
    FleetParams,
    HandleParams,
)
from .errors import MoEEpConfigError, MoEEpNotBuiltError
from .fleet import Fleet, Handle, _register_fleet

__all__ = ["LocalConfig", "NCCLEPConfig", "NcclEpConfig", "NvepConfig"]


@dataclass(frozen=True)
class NcclEpConfig:
    """The transport of the package ``nccl.ep``."""

    backend_name: str = "nccl_ep"


NCCLEPConfig = NcclEpConfig


@dataclass(frozen=True)
class NvepConfig:
    """The transport of the package ``nixl_ep``."""

    backend_name: str = "nixl_ep"


@dataclass(frozen=True)
class LocalConfig:
    """The transport of a single rank, on any device."""

    backend_name: str = "local"


class _LocalHandle(Handle):
    """An exchange of a rank with itself. Nothing is read back to the host.

    By expert, received tokens are ``(num_experts, max_tokens_per_rank, H)``, those of an expert in the order of the
    tokens, then zeros. By rank they are ``(1, max_tokens_per_rank, H)``; for many tokens ``(num_tokens, H)``.
    """

    def __init__(self, fleet: LocalFleet, ids: torch.Tensor, weights: Optional[torch.Tensor]) -> None:
        self._params, self._ids, self._weights = fleet.params, ids.long(), weights

    def _slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row of each id in the buffer (one past the end without an expert), and tokens of each expert."""
        experts, capacity = self._params.num_experts, self._params.max_tokens_per_rank
        is_here = (self._ids >= 0) & (self._ids < experts)
        column = torch.where(is_here, self._ids, experts)
        chosen = torch.zeros(len(column), experts + 1, dtype=torch.int64, device=column.device)
        chosen.scatter_(1, column, 1)
        place = (chosen.cumsum(0) - 1).gather(1, column)
        return torch.where(is_here, column * capacity + place, experts * capacity), chosen[:, :experts].sum(0)

    def dispatch(self, params: DispatchInputParams) -> DispatchOutput:
        tokens = params.x[0].shape[0]
        if self._params.is_by_expert:
            slots, counts = self._slots()
            size = self._params.num_experts * self._params.max_tokens_per_rank
            rows = torch.full((size + 1,), tokens, dtype=torch.int64, device=slots.device)
            numbers = torch.arange(tokens, device=slots.device).unsqueeze(1).expand_as(slots)
            rows.scatter_(0, slots.flatten(), numbers.flatten())
            sent = [self._rows(x, rows[:-1]).unflatten(0, (self._params.num_experts, -1)) for x in params.x]
            total = counts.sum()
            return DispatchOutput(
                sent, lambda: int(total), expert_counts=counts.to(torch.int32), recv_total_counter=total
            )
        ids = torch.where((self._ids >= 0) & (self._ids < self._params.num_experts), self._ids, -1).to(torch.int32)
        weights = self._weights if self._weights is not None else torch.ones_like(ids, dtype=torch.float32)
        sent = list(params.x)
        if self._params.layout == EpLayout.RANK_MAJOR:
            missing = self._params.max_tokens_per_rank - tokens
            sent = [torch.cat([x, x.new_zeros(missing, *x.shape[1:])]).unsqueeze(0) for x in sent]
            ids = torch.nn.functional.pad(ids, (0, 0, 0, missing), value=-1).unsqueeze(0)
            weights = torch.nn.functional.pad(weights, (0, 0, 0, missing)).unsqueeze(0)
        return DispatchOutput(sent, tokens, ids, weights)

    @staticmethod
    def _rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[rows]

    def combine(self, params: CombineInputParams) -> CombineOutput:
        result, tokens = params.x[0], self._ids.shape[0]
        if self._params.is_by_expert:
            parts = self._rows(result.flatten(0, 1), self._slots()[0]).float()
            if self._weights is not None:
                parts = parts * self._weights.unsqueeze(-1)
            sums = parts.sum(1)
        else:
            sums = (result[0] if result.dim() == 3 else result)[:tokens]
        out = torch.empty_like(sums, dtype=result.dtype) if params.out is None else params.out
        return CombineOutput(out.copy_(sums))

    def complete(self) -> None:
        """Return: work of a rank is ordered by its stream."""

    def destroy(self) -> None:
        self._weights = None


@_register_fleet("local")
class LocalFleet(Fleet):
    """A group of one rank, on the device of the tokens."""

    def __init__(self, bootstrap: BootstrapConfig, params: FleetParams, algo_knobs: Sequence[AlgoKnob] = ()) -> None:
        super().__init__(bootstrap, params, algo_knobs)
        self.update_topology(bootstrap, algo_knobs)

    def create_handle(self, params: HandleParams, algo_knobs: Sequence[AlgoKnob] = ()) -> Handle:
        if params.topk_ids.dim() != 2 or params.topk_ids.shape[0] > self.params.max_tokens_per_rank:
            raise MoEEpConfigError(
                f"LocalFleet.create_handle: topk_ids must be (at most {self.params.max_tokens_per_rank}, top_k), got "
                f"{tuple(params.topk_ids.shape)}"
            )
        knobs = _index_knobs(algo_knobs)
        weights, received = knobs.get(HandleAlgoKnobTopKWeights), knobs.get(HandleAlgoKnobNumReceivedTokens)
        if isinstance(received, HandleAlgoKnobNumReceivedTokens):
            received.target.fill_(params.topk_ids.shape[0])
        given = weights.weights if isinstance(weights, HandleAlgoKnobTopKWeights) else None
        return _LocalHandle(self, params.topk_ids, given)

    def update_topology(self, bootstrap: BootstrapConfig, algo_knobs: Sequence[AlgoKnob] = ()) -> None:
        if bootstrap.world_size != 1:
            raise MoEEpConfigError(f"LocalFleet: world_size must be 1, got {bootstrap.world_size}")
        self.bootstrap = bootstrap

    def destroy(self) -> None:
        """Return: a single rank keeps no memory."""


class _Missing(Fleet):
    """A transport by name: making one raises an error that names what is missing."""

    package = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MoEEpNotBuiltError(
            f"create_fleet: backend must be 'local', because this package has no adapter for {cls.package}, got "
            f"{cls.__name__}"
        )


@_register_fleet("nccl_ep")
class NcclEpFleet(_Missing):
    """The transport of ``nccl.ep``."""

    package = "nccl.ep"


@_register_fleet("nixl_ep")
class NixlEpFleet(_Missing):
    """The transport of ``nixl_ep``."""

    package = "nixl_ep"
