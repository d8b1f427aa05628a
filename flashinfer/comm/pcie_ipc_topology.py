# SPDX-License-Identifier: Apache-2.0
"""Profiles of PCIe trees, and the one that all ranks of a group use."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from .._runtime.errors import ArgumentError
from .comm_backend import TorchDistBackend
from .ulysses_topology import UlyssesRankTopology, probe_ulysses_rank_topology

__all__ = [
    "PCIE_IPC_PROFILES",
    "PROFILE_ROOTCPLX",
    "PROFILE_SWITCHPAIR",
    "probe_pcie_ipc_rank_topology",
    "resolve_pcie_ipc_profile",
]

PROFILE_ROOTCPLX = "rootcplx-noswitch"
PROFILE_SWITCHPAIR = "pcieswitch-pairs"
PCIE_IPC_PROFILES = (PROFILE_ROOTCPLX, PROFILE_SWITCHPAIR)
_ALIASES = {"rootcplx": PROFILE_ROOTCPLX, "pcieswitch": PROFILE_SWITCHPAIR}


def probe_pcie_ipc_rank_topology(rank: int, device: Union[int, str, torch.device, None] = None) -> UlyssesRankTopology:
    """Collect what this rank knows about its GPU."""
    return probe_ulysses_rank_topology(torch.device("cuda") if device is None else device, rank)


def resolve_pcie_ipc_profile(
    group: Any, requested: Optional[str] = None, device: Union[int, str, torch.device, None] = None
) -> str:
    """Return the profile that all ranks asked for; ``"rootcplx-noswitch"``, which assumes nothing, if none did."""
    op = "resolve_pcie_ipc_profile"
    comm = group if hasattr(group, "Get_rank") else TorchDistBackend(group)
    asked = list(comm.allgather(None if requested is None else _ALIASES.get(requested, requested)))
    for rank, one in enumerate(asked):
        if one is not None and one not in PCIE_IPC_PROFILES:
            known = ", ".join(PCIE_IPC_PROFILES)
            raise ArgumentError(f"{op}: requested must be one of {known}, got {one!r} on rank {rank}")
    if len(set(asked)) > 1:
        raise ArgumentError(f"{op}: requested must be equal on all ranks, got {asked}")
    return asked[0] or PROFILE_ROOTCPLX
