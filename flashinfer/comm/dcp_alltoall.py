# SPDX-License-Identifier: Apache-2.0
"""Exchange of partial attention between ranks that have parts of each context (decode context parallelism)."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch

from .._runtime.errors import ArgumentError
from ..api_logging import flashinfer_api
from ..trace.templates.comm import decode_cp_a2a_alltoall_trace, decode_cp_a2a_lse_reduce_trace
from .comm_backend import TorchDistBackend
from .exchange.table import get_alltoall_module
from .mapping import Mapping
from .memory.peers import PeerMemory, create_peer_memory
from .memory.waiting import waiting_for
from .mnnvl import MnnvlConfig, MnnvlMemory, round_up

__all__ = [
    "decode_cp_a2a_allocate_mnnvl_workspace",
    "decode_cp_a2a_alltoall",
    "decode_cp_a2a_init_workspace",
    "decode_cp_a2a_lse_reduce",
    "decode_cp_a2a_lse_reduce_create_workspace",
    "decode_cp_a2a_lse_reduce_workspace_size",
    "decode_cp_a2a_workspace_size",
]

_SLOT_BYTES = 2 << 20  # bytes of a slot, one per source and parity of calls; longer exchanges take several rounds
_MAX_CP = 64
#: Tables whose rows are workspaces of the merging exchange, by the address of this rank's row.
_merging: dict[int, tuple[PeerMemory, torch.Tensor]] = {}
_kept: list[MnnvlMemory] = []  # workspaces live as long as the process, as published ones do


def _head_bytes(cp_size: int) -> int:
    return round_up(16 + 8 * cp_size, 16)


def decode_cp_a2a_workspace_size(cp_size: int) -> int:
    """Return the bytes of a rank for :func:`decode_cp_a2a_alltoall`.

    Examples
    --------
    >>> flashinfer.comm.decode_cp_a2a_workspace_size(4) > flashinfer.comm.decode_cp_a2a_workspace_size(2)
    True
    """
    if not 1 <= cp_size <= _MAX_CP:
        raise ArgumentError(f"decode_cp_a2a_workspace_size: cp_size must be from 1 to {_MAX_CP}, got {cp_size}")
    return round_up(_head_bytes(cp_size) + 2 * cp_size * _SLOT_BYTES, 1024)


def decode_cp_a2a_allocate_mnnvl_workspace(
    mapping: Mapping, *, mnnvl_config: Optional[MnnvlConfig] = None, device: Union[str, torch.device, None] = None
) -> torch.Tensor:
    """Allocate the table of a context-parallel group, ``(cp, n)`` int64; every rank of the communicator calls it."""
    from .comm_backend import backend_for

    config = mnnvl_config or MnnvlConfig()
    comm = backend_for(config.comm_backend, None)
    if comm.Get_size() != mapping.cp_size:
        comm = comm.Split(mapping.pp_rank * mapping.tp_size + mapping.tp_rank, mapping.cp_rank)
    memory = MnnvlMemory(mapping, decode_cp_a2a_workspace_size(mapping.cp_size), comm=comm, device=device)
    _kept.append(memory)
    table = memory.as_torch_strided_tensor(torch.int64)
    waiting_for(table, mapping.cp_rank, comm=comm, is_new=True)
    return table


def decode_cp_a2a_init_workspace(workspace: torch.Tensor, cp_rank: int, cp_size: int) -> None:
    """Zero this rank's flags; the ranks meet before the first exchange."""
    _check_table("decode_cp_a2a_init_workspace", workspace, cp_rank, cp_size)
    workspace[cp_rank, : _head_bytes(cp_size) // 8].zero_()
    if workspace.is_cuda:
        torch.cuda.synchronize(workspace.device)
    waiting_for(workspace, cp_rank, is_new=True)


def _check_table(op: str, workspace: torch.Tensor, cp_rank: int, cp_size: int) -> None:
    if workspace.dtype != torch.int64 or workspace.dim() != 2 or workspace.shape[0] != cp_size:
        raise ArgumentError(
            f"{op}: workspace must be int64 of cp_size = {cp_size} rows, got {workspace.dtype} {tuple(workspace.shape)}"
        )
    if not 0 <= cp_rank < cp_size:
        raise ArgumentError(f"{op}: cp_rank must be in [0, {cp_size}), got {cp_rank}")


def _exchange(
    op: str,
    table: torch.Tensor,
    cp_rank: int,
    o: torch.Tensor,
    stats: torch.Tensor,
    outs: tuple[torch.Tensor, Optional[torch.Tensor]],
    is_base_e: bool,
    pdl: bool,
) -> None:
    """Run rounds of as many rows as a slot has room for."""
    world, rows = table.shape[0], o.shape[0]
    per_row = o.shape[2] * 2 + stats.shape[2] * 4
    slot = (table.shape[1] - _head_bytes(world)) // (2 * world) // 16 * 16
    step = max(slot // max(per_row, 1), 1)
    module, waiting = get_alltoall_module(table.device.type), waiting_for(table, cp_rank)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)

        def call(resume: bool, *waits: int, begin: int = begin, end: int = end) -> int:
            return module.decode_cp_exchange(
                *(o, stats, *outs, table, cp_rank, begin, end, is_base_e, resume, *waits, pdl)
            )

        waiting.run(op, 1, call)


@flashinfer_api(trace=decode_cp_a2a_alltoall_trace)
def decode_cp_a2a_alltoall(
    partial_o: torch.Tensor,
    softmax_stats: torch.Tensor,
    workspace: torch.Tensor,
    cp_rank: int,
    cp_size: int,
    enable_pdl: Optional[bool] = None,
    out: Optional[tuple[torch.Tensor, torch.Tensor]] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange partial results: ``o[..., p, :]`` of rank r is ``partial_o[..., r, :]`` of rank p, bit for bit.

    Parameters
    ----------
    partial_o : torch.Tensor
        ``(..., cp, D)`` float16 or bfloat16; rows of a multiple of 16 bytes.
    softmax_stats : torch.Tensor
        ``(..., cp, S)`` float32, S even; any bits.
    workspace : torch.Tensor
        Table ``(cp, n)`` int64 of :func:`decode_cp_a2a_allocate_mnnvl_workspace`.
    cp_rank, cp_size : int
        This rank and the size of the group.
    enable_pdl : bool, optional
        Programmatic dependent launch.
    out : tuple of torch.Tensor, optional
        Buffers of the results.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        The parts of all ranks, in the shapes of the inputs. Without rows nobody waits.

    Examples
    --------
    >>> workspace = torch.zeros(1, 1 << 20, dtype=torch.int64)
    >>> flashinfer.comm.decode_cp_a2a_init_workspace(workspace, 0, 1)
    >>> o, stats = torch.randn(2, 4, 1, 64).half(), torch.randn(2, 4, 1, 2)
    >>> found, _ = flashinfer.comm.decode_cp_a2a_alltoall(o, stats, workspace, 0, 1)
    >>> torch.equal(found, o)
    True
    """
    op = "decode_cp_a2a_alltoall"
    _check_table(op, workspace, cp_rank, cp_size)
    if partial_o.dim() < 2 or softmax_stats.dim() < 2 or partial_o.shape[:-1] != softmax_stats.shape[:-1]:
        raise ArgumentError(
            f"{op}: softmax_stats must have the leading dimensions of partial_o {tuple(partial_o.shape[:-1])}, got "
            f"{tuple(softmax_stats.shape)}"
        )
    if partial_o.shape[-2] != cp_size:
        raise ArgumentError(f"{op}: partial_o.shape[-2] must be cp_size = {cp_size}, got {partial_o.shape[-2]}")
    if softmax_stats.shape[-1] < 2 or softmax_stats.shape[-1] % 2:
        raise ArgumentError(f"{op}: softmax_stats.shape[-1] must be even, at least 2, got {softmax_stats.shape[-1]}")
    o, stats = partial_o.contiguous(), softmax_stats.contiguous()
    outs = (torch.empty_like(o), torch.empty_like(stats)) if out is None else out
    for name, given, like in (("out[0]", outs[0], o), ("out[1]", outs[1], stats)):
        if given.shape != like.shape or given.dtype != like.dtype:
            raise ArgumentError(
                f"{op}: {name} must be {like.dtype} {tuple(like.shape)}, got {given.dtype} {tuple(given.shape)}"
            )
    table = workspace.view(torch.uint8)
    flat = [x.flatten(0, -3) if x.dim() > 2 else x.unsqueeze(0) for x in (o, stats, *outs)]
    _exchange(op, table, cp_rank, flat[0], flat[1], (flat[2], flat[3]), False, enable_pdl is not False)
    return outs


def decode_cp_a2a_lse_reduce_workspace_size(
    max_tokens: int, local_heads: int, cp_size: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Return the bytes of a rank for :func:`decode_cp_a2a_lse_reduce`.

    Examples
    --------
    >>> flashinfer.comm.decode_cp_a2a_lse_reduce_workspace_size(16, 4, 2, 128, torch.float16)
    66592
    """
    op = "decode_cp_a2a_lse_reduce_workspace_size"
    sizes = {"max_tokens": max_tokens, "local_heads": local_heads, "cp_size": cp_size, "head_dim": head_dim}
    for name, value in sizes.items():
        if value <= 0:
            raise ArgumentError(f"{op}: {name} must be positive, got {value}")
    if cp_size > _MAX_CP:
        raise ArgumentError(f"{op}: cp_size must be at most {_MAX_CP}, got {cp_size}")
    if dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"{op}: dtype must be float16 or bfloat16, got {dtype}")
    if head_dim * 2 % 16:
        raise ArgumentError(f"{op}: head_dim must make rows of a multiple of 16 bytes, got {head_dim}")
    return _head_bytes(cp_size) + 2 * cp_size * max_tokens * local_heads * (head_dim * 2 + 4)


def decode_cp_a2a_lse_reduce_create_workspace(
    max_tokens: int,
    local_heads: int,
    cp_size: int,
    head_dim: int,
    dtype: torch.dtype,
    group: Any,
    *,
    device: Union[str, torch.device, None] = None,
) -> torch.Tensor:
    """Allocate the workspace of the merging exchange; every rank of ``group`` (or its name) calls it."""
    # A slot is a whole number of 16 bytes: at most 16 bytes of each would be lost to rounding.
    size = decode_cp_a2a_lse_reduce_workspace_size(max_tokens, local_heads, cp_size, head_dim, dtype) + 32 * cp_size
    if isinstance(group, str):
        group = torch.distributed.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    comm = group if hasattr(group, "allgather") and hasattr(group, "Get_rank") else TorchDistBackend(group)
    if comm.Get_size() != cp_size:
        raise ArgumentError(
            f"decode_cp_a2a_lse_reduce_create_workspace: cp_size must be {comm.Get_size()} (of group), got {cp_size}"
        )
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    stride = round_up(size, 4096 if where.type == "cpu" else 2 << 20)
    memory = create_peer_memory(
        comm,
        size,
        where,
        op="decode_cp_a2a_lse_reduce_create_workspace",
        initialise=lambda own: own.zero_(),
        stride=stride,
    )
    table = memory.rows()
    waiting_for(table, comm.Get_rank(), comm=comm, is_new=True)
    own = memory.own
    _merging[own.data_ptr()] = (memory, table)
    return own


@flashinfer_api(trace=decode_cp_a2a_lse_reduce_trace)
def decode_cp_a2a_lse_reduce(
    partial_o: torch.Tensor,
    partial_lse: torch.Tensor,
    workspace: torch.Tensor,
    cp_rank: int,
    cp_size: int,
    lse_mode: str = "base2",
) -> torch.Tensor:
    """Exchange partial results and merge those of each row: ``sum_p w_p o_p / sum_p w_p``, ``w_p = 2^(lse_p - max)``.

    Parameters
    ----------
    partial_o : torch.Tensor
        ``(..., cp, D)`` float16 or bfloat16: this rank's results for the rows of each rank.
    partial_lse : torch.Tensor
        ``(..., cp)`` float32; NaN and +inf count as -inf.
    workspace : torch.Tensor
        Of :func:`decode_cp_a2a_lse_reduce_create_workspace`.
    cp_rank, cp_size : int
        This rank and the size of the group.
    lse_mode : str
        ``"base2"``, or ``"basee"`` for natural logarithms.

    Returns
    -------
    torch.Tensor
        ``(..., D)``; zeros where no rank has keys.

    Examples
    --------
    >>> from flashinfer.comm.local_ranks import local_comms
    >>> sizes = (4, 2, 1, 64, torch.float16)
    >>> space = flashinfer.comm.decode_cp_a2a_lse_reduce_create_workspace(*sizes, local_comms(1)[0], device="cpu")
    >>> o, lse = torch.randn(4, 2, 1, 64).half(), torch.randn(4, 2, 1)
    >>> torch.equal(flashinfer.comm.decode_cp_a2a_lse_reduce(o, lse, space, 0, 1), o[:, :, 0])
    True
    """
    op = "decode_cp_a2a_lse_reduce"
    if lse_mode not in ("base2", "basee"):
        raise ArgumentError(f"{op}: lse_mode must be 'base2' or 'basee', got {lse_mode!r}")
    found = _merging.get(workspace.data_ptr())
    if found is None:
        raise ArgumentError(
            f"{op}: workspace must be made by decode_cp_a2a_lse_reduce_create_workspace, got another tensor"
        )
    memory, table = found
    if (memory.rank, memory.world_size) != (cp_rank, cp_size):
        raise ArgumentError(
            f"{op}: cp_rank and cp_size must be those of workspace ({memory.rank} of {memory.world_size}), got "
            f"{cp_rank} of {cp_size}"
        )
    if partial_o.dim() < 2 or partial_o.shape[:-1] != partial_lse.shape or partial_o.shape[-2] != cp_size:
        raise ArgumentError(
            f"{op}: partial_o must be (..., cp_size = {cp_size}, D) and partial_lse (..., cp_size), got "
            f"{tuple(partial_o.shape)} and {tuple(partial_lse.shape)}"
        )
    o = partial_o.contiguous().view(-1, cp_size, partial_o.shape[-1])
    lse = partial_lse.contiguous().view(-1, cp_size, 1)
    out = partial_o.new_empty(*partial_o.shape[:-2], partial_o.shape[-1])
    _exchange(op, table, cp_rank, o, lse, (out.view(-1, out.shape[-1]), None), lse_mode == "basee", True)
    return out
