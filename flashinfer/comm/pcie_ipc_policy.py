# SPDX-License-Identifier: Apache-2.0
"""Choice of the launch of an all-reduce over PCIe: a pure function of sizes, equal on all ranks."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Optional

__all__ = ["IpcLaunchConfig", "IpcVariant", "MAX_BLOCKS", "get_pcie_ipc_launch_config"]

MAX_BLOCKS = 128
WORLD_SIZES = (2, 4, 8)
_PACK_BYTES = 16


class IpcVariant(enum.IntEnum):
    """Ways of the data: from the input, through staging memory, around a ring, by copy engines."""

    UNSTAGED = 0
    STAGED = 1
    STAGED_RING = 2
    FLAT_STAGED = 3
    COPY_ENGINE_RING = 4
    COPY_ENGINE_ISLAND = 5
    COPY_ENGINE_RING_MEMOP = 6


COPY_ENGINES = (IpcVariant.COPY_ENGINE_RING, IpcVariant.COPY_ENGINE_ISLAND, IpcVariant.COPY_ENGINE_RING_MEMOP)


@dataclass(frozen=True)
class IpcLaunchConfig:
    """A launch."""

    blocks: int
    threads: int
    variant: IpcVariant


def _is_launchable(
    world_size: int, config: IpcLaunchConfig, max_blocks: int, numel: Optional[int] = None, elem_size: int = 2
) -> bool:
    """Return whether a launch is possible at all; with ``numel``, for this message."""
    blocks, threads, variant = config.blocks, config.threads, config.variant
    if not (0 < blocks <= max_blocks and world_size <= threads <= 1024):
        return False
    if world_size == 2 and variant not in (IpcVariant.UNSTAGED, IpcVariant.STAGED):
        return False
    if variant == IpcVariant.FLAT_STAGED and world_size != 8:
        return False
    if variant == IpcVariant.STAGED and world_size == 8 and blocks % 4:
        return False
    if variant not in COPY_ENGINES:
        return True
    is_island = variant == IpcVariant.COPY_ENGINE_ISLAND
    if (is_island and world_size != 8) or blocks > 4 or threads != 256:
        return False
    if numel is None:
        return True
    shards, pack = 4 if is_island else world_size, _PACK_BYTES // elem_size
    return numel % (shards * pack) == 0 and (numel // shards) % (blocks * pack) == 0


@functools.cache
def get_pcie_ipc_launch_config(
    world_size: int, numel: int, elem_size: int, max_blocks: int = MAX_BLOCKS
) -> Optional[IpcLaunchConfig]:
    """Return the launch for ``numel`` elements; None for messages that are left to others.

    Served are 2, 4 and 8 ranks, and whole 16 bytes, of which each rank has some.

    Examples
    --------
    >>> flashinfer.comm.get_pcie_ipc_launch_config(2, 4096, 2).blocks
    16
    """
    if world_size not in WORLD_SIZES or elem_size <= 0 or _PACK_BYTES % elem_size or max_blocks < 1:
        return None
    pack, nbytes = _PACK_BYTES // elem_size, numel * elem_size
    if numel % pack or numel < world_size * pack:
        return None
    if world_size == 2:
        return IpcLaunchConfig(min(16, max_blocks), 128, IpcVariant.UNSTAGED)
    if nbytes >= 32 << 10:
        return IpcLaunchConfig(min(max(nbytes // (256 << 10), 1), 4, max_blocks), 256, IpcVariant.STAGED_RING)
    if world_size == 4:
        return IpcLaunchConfig(1, 256, IpcVariant.STAGED)
    return IpcLaunchConfig(min(16, max_blocks), 256, IpcVariant.UNSTAGED)
