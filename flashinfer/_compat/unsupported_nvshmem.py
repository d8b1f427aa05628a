# SPDX-License-Identifier: Apache-2.0
"""Functions of ``flashinfer.comm.nvshmem``: each raises ImportError, which names the package that is missing."""

from __future__ import annotations

from typing import Any, Callable, NoReturn

from .unsupported import needs

__all__ = [
    "alloc_empty_unique_id",
    "alltoall",
    "barrier_all",
    "barrier_all_on_current_stream",
    "finalize",
    "free_tensor",
    "get_unique_id",
    "init",
    "malloc",
    "my_pe",
    "n_pes",
]


def _nvshmem(name: str, parameters: str = "") -> Callable[..., NoReturn]:
    described = needs(name, "NVSHMEM", parameters)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise ImportError(
            f"flashinfer.comm.nvshmem.{name}: needs NVSHMEM (the package nvshmem4py), to which this package has no "
            "adapter; flashinfer.comm.create_allreduce_fusion_workspace and MoeAlltoAll serve the GPUs of one host"
        )

    for attribute in ("__name__", "__qualname__", "__doc__", "__signature__"):
        setattr(missing, attribute, getattr(described, attribute))
    return missing


alloc_empty_unique_id = _nvshmem("alloc_empty_unique_id")
alltoall = _nvshmem("alltoall", "dest, source")
barrier_all = _nvshmem("barrier_all")
barrier_all_on_current_stream = _nvshmem("barrier_all_on_current_stream")
finalize = _nvshmem("finalize")
free_tensor = _nvshmem("free_tensor", "tensor")
get_unique_id = _nvshmem("get_unique_id")
init = _nvshmem("init", "uid, rank, world_size")
malloc = _nvshmem("malloc", "shape, dtype, device")
my_pe = _nvshmem("my_pe")
n_pes = _nvshmem("n_pes")
