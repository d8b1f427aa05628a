# SPDX-License-Identifier: Apache-2.0
"""Launches that a tuner of the all-reduce over PCIe would try, and how results are named and agreed on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional, Sequence, Union

import torch
import torch.distributed as dist

from .._runtime.knobs import knobs
from ..jit import env
from .pcie_ipc_policy import COPY_ENGINES, MAX_BLOCKS, IpcLaunchConfig, IpcVariant, _is_launchable
from .pcie_ipc_topology import PROFILE_ROOTCPLX

__all__ = [
    "INIT_MAX_VALUE",
    "PCIE_IPC_CUSTOM_OP",
    "TABLE_TACTIC",
    "TUNE_BATCHES",
    "TUNE_BLOCKS",
    "TUNE_REPEAT",
    "TUNE_THREADS",
    "TUNE_WARMUP",
    "cache_key_extras",
    "candidate_tactics",
    "config_to_tactic",
    "default_cache_path",
    "pack_config",
    "reduce_timings",
    "reduce_verdict",
    "resolve_tuned_config",
    "small_int_initializer",
    "tactic_to_config",
    "tuned_batches_for",
]

PCIE_IPC_CUSTOM_OP = "flashinfer::pcie_ipc_all_reduce"
PCIE_IPC_TUNE_VERSION = 1
TUNE_BLOCKS = (1, 2, 4, 8, 12, 16, 32, 64, 96, 128)
TUNE_THREADS = (64, 128, 256, 512, 1024)
TUNE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
TUNE_WARMUP, TUNE_REPEAT = 10, 50
TABLE_TACTIC = -1  # the launch of the policy
INIT_MAX_VALUE = 16
_LARGE = 4 << 20  # bytes from which few threads are not worth a trial

Tactic = tuple[int, int, int]


def config_to_tactic(config: IpcLaunchConfig) -> Tactic:
    """Return a launch as (variant, blocks, threads)."""
    return int(config.variant), config.blocks, config.threads


def tactic_to_config(tactic: Sequence[int]) -> IpcLaunchConfig:
    """Return the launch of (variant, blocks, threads)."""
    variant, blocks, threads = tactic
    return IpcLaunchConfig(blocks, threads, IpcVariant(variant))


def pack_config(config: IpcLaunchConfig) -> int:
    """Return a launch as one number."""
    return int(config.variant) << 32 | config.blocks << 16 | config.threads


def candidate_tactics(
    world_size: int,
    max_blocks: int = MAX_BLOCKS,
    blocks: Sequence[int] = TUNE_BLOCKS,
    threads: Sequence[int] = TUNE_THREADS,
    numel: Optional[int] = None,
    elem_size: int = 2,
    profile: Optional[str] = None,
    memop_supported: bool = False,
) -> list[Tactic]:
    """Return the launches that are possible, in a fixed order."""
    is_large = numel is not None and numel * elem_size >= _LARGE
    found = []
    for variant in IpcVariant:
        if variant == IpcVariant.COPY_ENGINE_ISLAND and profile != PROFILE_ROOTCPLX:
            continue
        if variant == IpcVariant.COPY_ENGINE_RING_MEMOP and not memop_supported:
            continue
        for count in blocks:
            for width in threads:
                if is_large and width < 256:
                    continue
                config = IpcLaunchConfig(count, width, variant)
                sized = numel if variant in COPY_ENGINES else None
                if _is_launchable(world_size, config, max_blocks, sized, elem_size):
                    found.append(config_to_tactic(config))
    return found


def resolve_tuned_config(
    table_config: Optional[IpcLaunchConfig],
    tactic: Union[int, Sequence[int]],
    world_size: int,
    max_blocks: int,
    numel: Optional[int] = None,
    elem_size: int = 2,
) -> Optional[IpcLaunchConfig]:
    """Return the launch of a tactic; that of the policy itself where the tactic is its number, or is not possible."""
    if isinstance(tactic, int) or table_config is None:
        return table_config
    try:
        config = tactic_to_config(tactic)
    except (TypeError, ValueError):
        return table_config
    return config if _is_launchable(world_size, config, max_blocks, numel, elem_size) else table_config


def cache_key_extras(
    world_size: int, profile: str, max_blocks: int, max_numel: int, dtype: torch.dtype, memop_supported: bool = False
) -> tuple[Any, ...]:
    """Return what results depend on besides the shape."""
    if memop_supported:
        return 4, world_size, profile, max_blocks, max_numel, True, str(dtype)
    return 3, world_size, profile, max_blocks, max_numel, str(dtype)


def tuned_batches_for(hidden: int, batches: Sequence[int], max_numel: int) -> tuple[int, ...]:
    """Return the batches whose rows fit in a workspace."""
    return tuple(batch for batch in batches if batch * hidden <= max_numel)


def small_int_initializer(shapes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """Return small whole numbers, whose sums are exact in 16 bits."""
    return torch.randint(0, INIT_MAX_VALUE, tuple(shapes), device=device).to(dtype)


def _largest(value: float, group: Any, dtype: torch.dtype) -> float:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    found = torch.tensor([value], dtype=dtype, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found.item()


def reduce_verdict(wrong: bool, group: Any) -> bool:
    """Return whether a trial was wrong on any rank."""
    return bool(_largest(int(wrong), group, torch.int32))


def reduce_timings(milliseconds: float, group: Any) -> float:
    """Return the time of the slowest rank."""
    return float(_largest(milliseconds, group, torch.float64))


def default_cache_path(world_size: int) -> Path:
    """Return where results of a group size are kept."""
    named = knobs.autotune_dir
    folder = Path(named) if named else env.FLASHINFER_WORKSPACE_DIR / "autotune"
    return folder / f"pcie_ipc_all_reduce_ws{world_size}.json"
