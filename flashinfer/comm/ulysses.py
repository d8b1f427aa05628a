# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism that swaps parts of the sequence for heads around attention (Ulysses).

Data go through the process group: ``all_to_all_single`` of torch.distributed, NCCL for GPUs and gloo for CPU tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

import torch

from .._runtime.errors import ArgumentError
from .comm_backend import TorchDistBackend
from .ulysses_topology import UlyssesBackendDecision, resolve_ulysses_backend

__all__ = ["UlyssesCommunicator", "UlyssesWorkspace", "merge_ulysses_output_head_chunk", "pack_ulysses_qkv_head_chunk"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class UlyssesWorkspace(NamedTuple):
    """Buffers of one exchange at a time."""

    send_buffer: torch.Tensor
    recv_buffer: torch.Tensor
    max_elems: int
    dtype: torch.dtype
    device: torch.device


def _check_capacity(name: str, max_elems: Any) -> None:
    if not isinstance(max_elems, int) or isinstance(max_elems, bool) or max_elems <= 0:
        raise ArgumentError(f"{name}: max_elems must be a positive int, got {max_elems!r}")
    if max_elems > 2**31 - 1:
        raise ArgumentError(f"{name}: max_elems must fit in int32, got {max_elems}")


def pack_ulysses_qkv_head_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    world_size: int,
    head_offset: int,
    head_count: int,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Return heads ``[head_offset, head_offset + head_count)`` of each rank's as sent, ``(W, B, S, n, 3D)``."""
    op = "pack_ulysses_qkv_head_chunk"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.shape != q.shape:
            raise ArgumentError(f"{op}: {name} must be 4-D, of the shape of q {tuple(q.shape)}, got {tuple(x.shape)}")
    heads = q.shape[2]
    if heads % world_size or not 0 <= head_offset < head_offset + head_count <= heads // world_size:
        raise ArgumentError(
            f"{op}: head_offset and head_count must be within the {heads} / {world_size} heads of a rank, got "
            f"{head_offset} and {head_count}"
        )
    parts = [
        x.unflatten(2, (world_size, -1))[:, :, :, head_offset : head_offset + head_count].permute(2, 0, 1, 3, 4)
        for x in (q, k, v)
    ]
    packed = torch.cat(parts, -1)
    return packed if out is None else out.copy_(packed)


def merge_ulysses_output_head_chunk(
    received: torch.Tensor, *, world_size: int, local_heads: int, head_offset: int, out: torch.Tensor
) -> torch.Tensor:
    """Write received heads ``(W, B, S, n, D)`` into their band of ``out`` ``(B, S, W * local_heads, D)``."""
    op, count = "merge_ulysses_output_head_chunk", received.shape[3]
    if received.shape[0] != world_size or head_offset + count > local_heads:
        raise ArgumentError(
            f"{op}: received must be ({world_size}, B, S, at most {local_heads - head_offset} heads, D), got "
            f"{tuple(received.shape)}"
        )
    bands = out.unflatten(2, (world_size, local_heads))
    bands[:, :, :, head_offset : head_offset + count].copy_(received.permute(1, 2, 0, 3, 4))
    return out


class UlyssesCommunicator:
    """Exchange of sequence parts and heads between the ranks of a group; every rank makes it.

    Parameters
    ----------
    group
        Process group; default: the default group.
    max_elems : int
        Most elements of an exchanged tensor.
    dtype : torch.dtype
        float16, bfloat16 or float32.
    backend : str
        ``"auto"`` or ``"nccl"``: the process group. ``"nvlink"`` raises, because this package has no such kernel yet.
    device
        Default: the current CUDA device, or the CPU where there is none.
    """

    def __init__(
        self,
        group: Optional[Any] = None,
        *,
        max_elems: int,
        dtype: torch.dtype,
        backend: str = "auto",
        device: Union[int, str, torch.device, None] = None,
    ) -> None:
        comm = TorchDistBackend(group)
        self.rank, self.world_size, self._group, self._is_open = comm.Get_rank(), comm.Get_size(), group, True
        found: Optional[Exception] = None
        try:
            _check_capacity("UlyssesCommunicator", max_elems)
            if dtype not in _DTYPES:
                raise ArgumentError(f"UlyssesCommunicator: dtype must be float16, bfloat16 or float32, got {dtype}")
            self.device = self._device_of(device)
        except Exception as error:
            found = error
        wanted = comm.allgather((found, max_elems, str(dtype), backend))
        for rank, (failure, *_) in enumerate(wanted):
            if failure is not None:
                raise type(failure)(f"{failure} (rank {rank})")
        if len({repr(one[1:]) for one in wanted}) > 1:
            raise ArgumentError(
                "UlyssesCommunicator: max_elems, dtype or backend inconsistent across ranks, got "
                f"{[one[1:] for one in wanted]}"
            )
        self.max_elems, self.dtype = max_elems, dtype
        self.topology_decision: Optional[UlyssesBackendDecision] = None
        self.decision = UlyssesBackendDecision("nccl")
        if backend != "nccl" and self.device.type == "cuda" and self.world_size > 1:
            self.topology_decision = resolve_ulysses_backend(backend, group, self.device)
        if backend == "nvlink":
            raise RuntimeError("UlyssesCommunicator: backend='nvlink' needs a kernel, which is not here yet")
        if backend not in ("auto", "nccl"):
            raise ArgumentError(f"UlyssesCommunicator: backend must be one of auto, nccl, nvlink, got {backend!r}")
        reason = None if backend == "nccl" else "data go through the process group"
        self.decision = UlyssesBackendDecision("nccl", reason)
        self.backend, self.fallback_reason = "nccl", reason

    @staticmethod
    def _device_of(device: Union[int, str, torch.device, None]) -> torch.device:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if isinstance(device, (int, str)) and (isinstance(device, int) or device.startswith("cuda:")):
            index = device if isinstance(device, int) else int(device.split(":")[1])
            if index >= torch.cuda.device_count():  # before torch keeps the index in 8 bits
                raise ArgumentError(
                    f"UlyssesCommunicator: device must be below the device count "
                    f"{torch.cuda.device_count()}, got {index}"
                )
            device = f"cuda:{index}"
        found = torch.device(device)
        if found.type not in ("cuda", "cpu"):
            raise ArgumentError(f"UlyssesCommunicator: device must be a CUDA device or the CPU, got {found}")
        return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found

    def _check(self, op: str, x: Any, divided: int, out: Optional[torch.Tensor], shape: tuple[int, ...]) -> None:
        if not self._is_open:
            raise RuntimeError(f"UlyssesCommunicator.{op}: use-after-close: it must be open, got a closed one")
        name = f"UlyssesCommunicator.{op}"
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: x must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ArgumentError(f"{name}: x must be 4-D, got {x.dim()}-D")
        if x.device != self.device:
            raise ArgumentError(f"{name}: the communicator is bound to {self.device}, got x on {x.device}")
        if x.dtype != self.dtype:
            raise ArgumentError(f"{name}: dtype of x must be {self.dtype}, got {x.dtype}")
        if not x.is_contiguous():
            raise ArgumentError(f"{name}: x must be contiguous, got strides {x.stride()}")
        if min(x.shape) < 1:
            raise ArgumentError(f"{name}: sizes of x must be positive, got {tuple(x.shape)}")
        if x.numel() > self.max_elems:
            raise ArgumentError(f"{name}: x exceeds capacity max_elems {self.max_elems}, got {x.numel()} elements")
        if divided % self.world_size:
            raise ArgumentError(f"{name}: {divided} must be divisible by the world size {self.world_size}")
        if out is not None and (tuple(out.shape) != shape or not out.is_contiguous() or out.dtype != x.dtype):
            raise ArgumentError(f"{name}: out must be {x.dtype} {shape}, contiguous, got {out.dtype} {out.shape}")
        if out is not None and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            raise ArgumentError(f"{name}: out must not share memory with x, got the same storage")

    def _all_to_all(self, sent: torch.Tensor) -> torch.Tensor:
        """Exchange the leading dimension of a contiguous tensor with the ranks."""
        if self.world_size == 1:
            return sent
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(
            received.view(torch.uint8).flatten(), sent.view(torch.uint8).flatten(), group=self._group
        )
        return received

    def scatter_heads(
        self, x: torch.Tensor, *, out: Optional[torch.Tensor] = None, workspace: Optional[UlyssesWorkspace] = None
    ) -> torch.Tensor:
        """Return the whole sequence of this rank's heads: ``(B, S, H, D)`` -> ``(B, S * W, H / W, D)``.

        Parameters
        ----------
        x : torch.Tensor
            This rank's part of the sequence with all heads, contiguous.
        out : torch.Tensor, optional
            Contiguous, of the shape of the result, apart from ``x``.
        workspace : UlyssesWorkspace, optional
            Accepted; the process group has buffers of its own.

        Returns
        -------
        torch.Tensor
            Parts in rank order, bit for bit; ``x`` itself in a group of one rank.
        """
        w = self.world_size
        is_4d = isinstance(x, torch.Tensor) and x.dim() == 4
        b, s, h, d = x.shape if is_4d else (0, 0, 0, 0)
        self._check("scatter_heads", x, h, out, (b, s * w, h // w, d))
        if w == 1:
            return x if out is None else out.copy_(x)
        received = self._all_to_all(x.view(b, s, w, h // w, d).permute(2, 0, 1, 3, 4).contiguous())
        result = received.transpose(0, 1).reshape(b, w * s, h // w, d)
        return result if out is None else out.copy_(result)

    def gather_heads(
        self, x: torch.Tensor, *, out: Optional[torch.Tensor] = None, workspace: Optional[UlyssesWorkspace] = None
    ) -> torch.Tensor:
        """Return all heads of this rank's part of the sequence: ``(B, S, H, D)`` -> ``(B, S / W, H * W, D)``.

        Parameters
        ----------
        x : torch.Tensor
            The whole sequence of this rank's heads, contiguous.
        out, workspace
            As of :meth:`scatter_heads`.

        Returns
        -------
        torch.Tensor
            Heads in rank order, bit for bit; ``x`` itself in a group of one rank.
        """
        w = self.world_size
        is_4d = isinstance(x, torch.Tensor) and x.dim() == 4
        b, s, h, d = x.shape if is_4d else (0, 0, 0, 0)
        self._check("gather_heads", x, s, out, (b, s // w, h * w, d))
        if w == 1:
            return x if out is None else out.copy_(x)
        received = self._all_to_all(x.view(b, w, s // w, h, d).transpose(0, 1).contiguous())
        result = received.permute(1, 2, 0, 3, 4).reshape(b, s // w, w * h, d)
        return result if out is None else out.copy_(result)

    def create_workspace(self, *, max_elems: Optional[int] = None) -> UlyssesWorkspace:
        """Allocate buffers for exchanges of up to ``max_elems`` elements; not collective."""
        size = self.max_elems if max_elems is None else max_elems
        _check_capacity("UlyssesCommunicator.create_workspace", size)
        if size > self.max_elems:
            raise ArgumentError(
                f"UlyssesCommunicator.create_workspace: max_elems must be at most {self.max_elems}, got {size}"
            )
        sent, received = (torch.empty(size, dtype=self.dtype, device=self.device) for _ in range(2))
        return UlyssesWorkspace(sent, received, size, self.dtype, self.device)

    def scatter_qkv_head_chunk(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        head_offset: int,
        head_count: int,
        out: Optional[torch.Tensor] = None,
        workspace: Optional[UlyssesWorkspace] = None,
    ) -> torch.Tensor:
        """Return some heads of the whole sequence, q, k and v side by side: ``(B, S * W, head_count, 3 * D)``."""
        packed = pack_ulysses_qkv_head_chunk(
            q, k, v, world_size=self.world_size, head_offset=head_offset, head_count=head_count
        )
        received = self._all_to_all(packed)
        result = received.transpose(0, 1).flatten(1, 2)
        return result.contiguous() if out is None else out.copy_(result)

    def gather_output_head_chunk(
        self,
        x: torch.Tensor,
        *,
        local_heads: int,
        head_offset: int,
        out: torch.Tensor,
        workspace: Optional[UlyssesWorkspace] = None,
    ) -> torch.Tensor:
        """Write some heads of this rank's part of the sequence into their band of ``out`` ``(B, S, H, D)``."""
        b, s, count, d = x.shape
        w = self.world_size
        received = self._all_to_all(x.view(b, w, s // w, count, d).transpose(0, 1).contiguous())
        return merge_ulysses_output_head_chunk(
            received, world_size=w, local_heads=local_heads, head_offset=head_offset, out=out
        )

    def close(self) -> None:
        """End the use; any number of times."""
        self._is_open = False

    def __enter__(self) -> UlyssesCommunicator:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
