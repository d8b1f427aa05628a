# SPDX-License-Identifier: Apache-2.0
"""All-reduce of ranks without NVLink, by its published class. The policy of launches is that of the published kernels;
what runs is the all-reduce of this package, which pushes over CUDA IPC wherever GPUs reach each other."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Union

import torch

from .._runtime.errors import ArgumentError
from .allreduce import allreduce_fusion
from .comm_backend import TorchDistBackend
from .memory.transaction import Transaction
from .pcie_ipc_policy import MAX_BLOCKS, WORLD_SIZES, IpcLaunchConfig, _is_launchable, get_pcie_ipc_launch_config
from .pcie_ipc_topology import resolve_pcie_ipc_profile
from .reduce.workspace import TRTLLMAllReduceFusionWorkspace, get_allreduce_module

__all__ = ["PcieIpcAllReduceWorkspace", "get_pcie_ipc_comm_module"]

_OP = "PcieIpcAllReduceWorkspace"


class PcieIpcAllReduceWorkspace:
    """Memory of a group of 2, 4 or 8 ranks for sums of up to ``max_numel`` elements; every rank makes it, or none.

    Parameters
    ----------
    group
        Process group, or a communication backend.
    max_numel : int
        Most elements of a message.
    dtype : torch.dtype
        float16 or bfloat16.
    max_blocks : int
        Most blocks of a launch of the policy, up to 128.
    profile : str, optional
        Of :func:`resolve_pcie_ipc_profile`.
    tune_batches, tune_cache
        Accepted; there is one kernel, so nothing to tune.
    device
        Default: the current CUDA device, or the CPU where there is none.
    """

    def __init__(
        self,
        group: Any,
        max_numel: int,
        dtype: torch.dtype = torch.bfloat16,
        max_blocks: int = MAX_BLOCKS,
        profile: Optional[str] = None,
        tune_batches: Optional[Sequence[int]] = None,
        tune_cache: Optional[Any] = None,
        *,
        device: Union[str, torch.device, None] = None,
    ) -> None:
        comm = group if hasattr(group, "Get_rank") else TorchDistBackend(group)
        world, rank = comm.Get_size(), comm.Get_rank()

        def check() -> None:
            if world not in WORLD_SIZES:
                raise ArgumentError(f"{_OP}: group must have 2, 4 or 8 ranks, got {world}")
            if dtype not in (torch.float16, torch.bfloat16):
                raise ArgumentError(f"{_OP}: dtype must be float16 or bfloat16, got {dtype}")
            if max_numel < 8 * world:
                raise ArgumentError(f"{_OP}: max_numel must be at least {8 * world}, got {max_numel}")
            if not 1 <= max_blocks <= MAX_BLOCKS:
                raise ArgumentError(f"{_OP}: max_blocks must be from 1 to {MAX_BLOCKS}, got {max_blocks}")

        with Transaction(comm, _OP) as transaction:
            transaction.stage("check arguments", check)
            transaction.commit()
        self.profile = resolve_pcie_ipc_profile(comm, profile, device)
        self.world_size, self.rank, self.dtype = world, rank, dtype
        self.max_numel, self.elem_size, self.max_blocks = max_numel, dtype.itemsize, max_blocks
        self._space = TRTLLMAllReduceFusionWorkspace(world, rank, 1, max_numel, dtype, comm, device=device)
        self.handle = self._space._memory.ptrs[rank]
        self._stream: Optional[int] = None

    def _check_device(self, inp: torch.Tensor) -> None:
        if inp.device != self._space.device:
            raise ArgumentError(f"{_OP}: inp must be on {self._space.device}, got {inp.device}")

    def launch_config(self, inp: torch.Tensor) -> Optional[IpcLaunchConfig]:
        """Return what the policy says for a message; None if it is not served."""
        self._check_device(inp)
        if inp.dtype != self.dtype or inp.numel() > self.max_numel or not inp.is_contiguous():
            return None
        return get_pcie_ipc_launch_config(self.world_size, inp.numel(), self.elem_size, self.max_blocks)

    def tuned_launch_config(self, inp: torch.Tensor) -> Optional[IpcLaunchConfig]:
        """Return the same as :meth:`launch_config`: nothing is tuned."""
        return self.launch_config(inp)

    def supports(self, inp: torch.Tensor) -> bool:
        """Return whether :meth:`all_reduce` takes a tensor."""
        return self.launch_config(inp) is not None

    def rebind_stream(self) -> None:
        """Let the next call choose the stream of this workspace anew."""
        self._stream = None

    def _check_stream(self) -> None:
        if self._space.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self._space.device).cuda_stream
        if self._stream is not None and self._stream != stream:
            raise RuntimeError(
                f"{_OP}: calls must be on one stream, because they share flags; got another one without rebind_stream()"
            )
        self._stream = stream

    def all_reduce(
        self,
        inp: torch.Tensor,
        *,
        out: Optional[torch.Tensor] = None,
        config: Optional[IpcLaunchConfig] = None,
        enable_pdl: bool = False,
    ) -> torch.Tensor:
        """Return the sum of ``inp`` over the ranks: float32, in rank order, rounded once; ``out`` may be ``inp``."""
        found = self.launch_config(inp) if config is None else config
        if found is None:
            raise ArgumentError(
                f"{_OP}: inp must be contiguous {self.dtype} of whole 16 bytes and at most {self.max_numel} elements, "
                f"got {inp.dtype} {tuple(inp.shape)}"
            )
        if not _is_launchable(self.world_size, found, self.max_blocks, inp.numel(), self.elem_size):
            raise ArgumentError(f"{_OP}: config must be possible for {self.world_size} ranks, got {found}")
        self._check_stream()
        out = torch.empty_like(inp) if out is None else out
        width = next(w for w in (4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8) if inp.numel() % w == 0)
        rows = inp.view(-1, width)
        allreduce_fusion(rows, self._space, 0, enable_pdl, output=out.view(-1, width))
        return out

    def prepare(self, shapes: Sequence[Sequence[int]], *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Do nothing: every shape that is served may be captured at once."""

    def tune(self, hiddens: Sequence[int], **_: Any) -> dict[str, Any]:
        """Raise NotImplementedError: this package has one kernel, so there is nothing to choose."""
        raise NotImplementedError(f"{_OP}.tune: there is one kernel in this package; launch_config says the policy")

    def destroy(self) -> None:
        """Give the memory back; not collective, and safe to repeat."""
        self._space.destroy()


def get_pcie_ipc_comm_module() -> Any:
    """Return the module of the all-reduce for CUDA."""
    return get_allreduce_module("cuda")
