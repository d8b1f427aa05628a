# SPDX-License-Identifier: Apache-2.0
"""Start torch.distributed for a layer, and select the GPU of its rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Iterable, Optional

import torch

from .config import BootstrapConfig
from .errors import MoEEpNotBuiltError

__all__ = [
    "NVSHMEM",
    "TORCH_DIST",
    "RuntimeHandle",
    "bootstrap_moe_ep_runtime",
    "ensure_moe_ep_cuda_device",
    "finalize_moe_ep_runtime",
]

TORCH_DIST = "torch_dist"
NVSHMEM = "nvshmem"

_users = 0
_is_ours = False  # torch.distributed was started here


@dataclass(eq=False)
class RuntimeHandle:
    """One user of what was started."""

    is_open: bool = True


def _start_distributed(bootstrap: BootstrapConfig) -> None:
    distributed = torch.distributed
    if distributed.is_torchelastic_launched():
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    elif bootstrap.world_size == 1:
        distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29500", world_size=1, rank=0)
    else:
        raise RuntimeError(
            "bootstrap_moe_ep_runtime: torch.distributed must run, or torchrun must have started the process, for a "
            f"world_size of more than 1, got {bootstrap.world_size}"
        )


def bootstrap_moe_ep_runtime(bootstrap: BootstrapConfig, requirements: Iterable[str]) -> RuntimeHandle:
    """Start what is not running yet; what was started ends with its last user."""
    global _users, _is_ours
    wanted = set(requirements)
    unknown = wanted - {TORCH_DIST, NVSHMEM}
    if unknown:
        raise ValueError(
            f"bootstrap_moe_ep_runtime: requirements must be of {TORCH_DIST}, {NVSHMEM}, got {sorted(unknown)}"
        )
    if NVSHMEM in wanted:
        raise MoEEpNotBuiltError("bootstrap_moe_ep_runtime: requirements must not have nvshmem, which is not used here")
    if TORCH_DIST in wanted and not torch.distributed.is_initialized():
        _start_distributed(bootstrap)
        _is_ours = True
    _users += 1
    return RuntimeHandle()


def finalize_moe_ep_runtime(handle: RuntimeHandle) -> None:
    """End one use; any number of times."""
    global _users, _is_ours
    if not handle.is_open:
        return
    handle.is_open = False
    _users -= 1
    if _users == 0 and _is_ours:
        _is_ours = False
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def ensure_moe_ep_cuda_device(bootstrap: BootstrapConfig) -> Optional[int]:
    """Make the rank's GPU current and return its index: ``bootstrap.device``, else LOCAL_RANK, else the rank.

    Without a GPU there is nothing to do, and the result is None.
    """
    if not torch.cuda.is_available():
        return None
    local = os.environ.get("LOCAL_RANK")  # a variable of torchrun, none of ours
    index = bootstrap.device if bootstrap.device is not None else int(local) if local else bootstrap.rank
    torch.cuda.set_device(index)
    return index
