# SPDX-License-Identifier: Apache-2.0
"""Decide whether ranks may write into each other's memory: each probes its GPU, and all draw the same conclusion."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import torch

from .._runtime.errors import ArgumentError

__all__ = [
    "UlyssesBackendDecision",
    "UlyssesBackendError",
    "UlyssesRankTopology",
    "decide_ulysses_backend",
    "probe_ulysses_rank_topology",
    "resolve_ulysses_backend",
]

BACKENDS = ("auto", "nccl", "nvlink")


class UlyssesBackendError(RuntimeError):
    """A backend that was asked for and that these ranks cannot use."""


@dataclass(frozen=True)
class UlyssesBackendDecision:
    """A backend, and why it was chosen over the other one."""

    backend: str
    reason: Optional[str] = None


@dataclass(frozen=True)
class UlyssesRankTopology:
    """Facts that one rank collects about its GPU and those of the others, by their bus."""

    rank: int
    hostname: str = ""
    device_index: int = -1
    device_uuid: str = ""
    pci_bus_id: str = ""
    peer_p2p: Mapping[str, bool] = field(default_factory=dict)
    peer_nvlink: Mapping[str, bool] = field(default_factory=dict)
    pair_errors: Mapping[str, str] = field(default_factory=dict)
    probe_error: Optional[str] = None


def _objection(topologies: Sequence[UlyssesRankTopology], supported_world_sizes: Sequence[int]) -> Optional[str]:
    """Return why these ranks cannot write into each other's memory, or None."""
    world = len(topologies)
    if sorted(one.rank for one in topologies) != list(range(world)):
        return f"ranks must be 0 to {world - 1}, got {sorted(one.rank for one in topologies)}"
    by_rank = sorted(topologies, key=lambda one: one.rank)
    for one in by_rank:
        if one.probe_error is not None:
            return f"rank {one.rank} could not probe its GPU: {one.probe_error}"
    if world not in supported_world_sizes:
        return f"world size {world} is not one of {', '.join(map(str, supported_world_sizes))}"
    if len({one.hostname for one in by_rank}) > 1:
        return f"ranks are on several hosts: {', '.join(sorted({one.hostname for one in by_rank}))}"
    for one in by_rank:
        if not one.device_uuid or not one.pci_bus_id:
            return f"rank {one.rank} has a GPU of unknown identity"
    if len({one.device_uuid for one in by_rank}) < world:
        return "ranks must have distinct physical GPUs, got one of several ranks"
    for one in by_rank:
        for other in by_rank:
            if one is other:
                continue
            pair = f"rank {one.rank} and rank {other.rank}"
            if other.pci_bus_id in one.pair_errors:
                return f"{pair}: {one.pair_errors[other.pci_bus_id]}"
            if not one.peer_p2p.get(other.pci_bus_id, False):
                return f"{pair} have no peer-to-peer access"
            if not one.peer_nvlink.get(other.pci_bus_id, False):
                return f"{pair} have no NVLink"
    return None


def decide_ulysses_backend(
    requested: str,
    topologies: Sequence[UlyssesRankTopology],
    supported_world_sizes: Sequence[int] = (2, 4, 6, 8),
) -> UlyssesBackendDecision:
    """Return the backend for ranks; the same on all of them, because it depends on what all gathered.

    Examples
    --------
    >>> flashinfer.comm.decide_ulysses_backend("nccl", []).backend
    'nccl'
    """
    if requested not in BACKENDS:
        raise ArgumentError(f"decide_ulysses_backend: backend must be one of {', '.join(BACKENDS)}, got {requested!r}")
    if requested == "nccl":
        return UlyssesBackendDecision("nccl")
    reason = _objection(topologies, supported_world_sizes)
    if reason is None:
        return UlyssesBackendDecision("nvlink")
    if requested == "nvlink":
        raise UlyssesBackendError(f"backend='nvlink' requested but {reason}")
    return UlyssesBackendDecision("nccl", reason)


def probe_ulysses_rank_topology(device: Union[int, str, torch.device, None], rank: int) -> UlyssesRankTopology:
    """Return what this rank knows; a failure is told in ``probe_error``."""
    try:
        if not torch.cuda.is_available():
            return UlyssesRankTopology(rank, socket.gethostname(), probe_error="there is no GPU")
        index = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device or "cuda").index
        index = torch.cuda.current_device() if index is None else index

        def bus_of(i: int) -> str:
            p: Any = torch.cuda.get_device_properties(i)
            return f"{p.pci_domain_id:08x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"

        others = [i for i in range(torch.cuda.device_count()) if i != index]
        access = {bus_of(i): bool(torch.cuda.can_device_access_peer(index, i)) for i in others}
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        return UlyssesRankTopology(rank, socket.gethostname(), index, uuid, bus_of(index), access, dict(access))
    except Exception as error:  # told to all ranks, which then decide alike
        return UlyssesRankTopology(rank, socket.gethostname(), probe_error=f"{type(error).__name__}: {error}")


def resolve_ulysses_backend(
    backend: str = "auto", group: Optional[Any] = None, device: Union[int, str, torch.device, None] = None
) -> UlyssesBackendDecision:
    """Probe on all ranks of a group and decide; every rank calls it, and all return or raise the same."""
    from . import ulysses_topology
    from .comm_backend import TorchDistBackend

    comm = TorchDistBackend(group)
    rank = comm.Get_rank()
    requests = comm.allgather(backend)
    topologies = comm.allgather(ulysses_topology.probe_ulysses_rank_topology(device, rank))
    found: Union[UlyssesBackendDecision, Exception]
    try:
        if len(set(requests)) > 1:
            raise ArgumentError(f"resolve_ulysses_backend: backend inconsistent across ranks, got {list(requests)}")
        found = decide_ulysses_backend(backend, topologies)
    except Exception as error:
        found = error
    for rank, other in enumerate(comm.allgather(found)):
        if isinstance(other, Exception):
            raise type(other)(str(other)) from None
        if other != found:
            raise RuntimeError(f"resolve_ulysses_backend: decisions inconsistent across ranks, rank {rank} has {other}")
    assert isinstance(found, UlyssesBackendDecision)
    return found
