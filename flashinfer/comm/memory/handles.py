# SPDX-License-Identifier: Apache-2.0
"""Handles of memory passed between ranks: file descriptors on one host, anything that can be pickled otherwise."""

from __future__ import annotations

import os
from typing import Any

from ..comm_backend import all_ranks_agree
from ..fd_exchange import broadcast_fd, exchange_fds
from .probes import is_mnnvl_fabric_supported

__all__ = [
    "HandleExchanger",
    "handle_allgather",
    "handle_broadcast",
    "handle_cleanup",
    "handle_close",
    "make_handle_exchanger",
]

_POSIX_FD, _FABRIC = 1, 8  # CUmemAllocationHandleType


class HandleExchanger:
    """Ranks of a group and the kind of their handles; every rank makes the same calls."""

    def __init__(self, comm: Any, rank: int, size: int, handle_type: int) -> None:
        self.comm, self.rank, self.size, self.handle_type = comm, rank, size, int(handle_type)

    @property
    def is_descriptor(self) -> bool:
        return self.handle_type == _POSIX_FD


def make_handle_exchanger(comm: Any, rank: int, size: int, dev_id: int) -> HandleExchanger:
    """Return the exchange that all ranks can take part in: fabric handles if every GPU has them, else descriptors."""
    has_fabric = all_ranks_agree(comm, is_mnnvl_fabric_supported(dev_id))
    return HandleExchanger(comm, rank, size, _FABRIC if has_fabric else _POSIX_FD)


def handle_allgather(ex: HandleExchanger, local_handle: Any) -> list[Any]:
    """Return the handles of all ranks, in rank order; :func:`handle_cleanup` closes descriptors of peers."""
    return exchange_fds(ex.comm, local_handle) if ex.is_descriptor else list(ex.comm.allgather(local_handle))


def handle_broadcast(ex: HandleExchanger, handle: Any, root: int) -> Any:
    """Return the handle of rank ``root`` on every rank."""
    if ex.is_descriptor:
        return broadcast_fd(ex.comm, handle if ex.rank == root else None, root)
    return ex.comm.allgather(handle)[root]


def handle_cleanup(ex: HandleExchanger, handle: Any) -> None:
    """Close a handle that is imported; only descriptors need it."""
    if ex.is_descriptor:
        os.close(handle)


def handle_close(ex: HandleExchanger) -> None:
    """End the use of an exchange, which keeps nothing open between calls."""
