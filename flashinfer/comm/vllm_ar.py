# SPDX-License-Identifier: Apache-2.0
"""vLLM's custom all-reduce: ranks read each other's inputs in memory that all map (create_shared_buffer).

``flashinfer.comm`` has these functions with the prefix ``vllm_``.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from typing import Sequence

import torch

from .._runtime.errors import ArgumentError
from ..api_logging import flashinfer_api
from ..jit.codegen import module_cache
from ..jit.comm import gen_vllm_ar_module as gen_vllm_ar_module
from ..trace.templates.comm import vllm_all_reduce_trace
from .comm_backend import seconds_of
from .errors import CommTimeoutError

__all__ = [
    "all_reduce",
    "dispose",
    "get_graph_buffer_ipc_meta",
    "init_custom_ar",
    "meta_size",
    "register_buffer",
    "register_graph_buffers",
]

get_vllm_ar_module = module_cache(gen_vllm_ar_module)

_OP = "vllm_all_reduce"
_MAX_CTAS, _MAX_WORLD = 36, 8
_META_BYTES = 512  # PULL_HEAD_BYTES of include/flashinfer/comm/pull/params.h
_ENTRY = 8  # addresses of an entry of rank_data, one per rank
_ABORTED = 12  # bytes of PullHead in front of its word `aborted`
_WAIT_US = 50_000  # a call on the CPU returns to Python after this time, so that signals are handled
#: Bytes from which each rank sums a part, by number of ranks; two ranks never do.
_TWO_SHOT_BYTES = {2: 1 << 62, 4: 512 << 10, 8: 256 << 10}


class _CustomAllReduce:
    """One rank's view of the shared memory, and the inputs that all ranks have registered."""

    def __init__(self, ipc_ptrs: Sequence[int], rank_data: torch.Tensor, rank: int) -> None:
        self.rank, self.world = rank, len(ipc_ptrs)
        self.heads = torch.tensor(list(ipc_ptrs), dtype=torch.int64)
        self.rank_data = rank_data.view(torch.int64)
        self.device = rank_data.device
        self.entries: dict[int, int] = {}  # address of the own input -> index of its entry
        self.captured: list[tuple[int, int]] = []  # address and entry of inputs of captured graphs
        self.used = 0
        self.seconds, self.broken = seconds_of(None), ""
        self.record = torch.zeros(4, dtype=torch.int32, pin_memory=True) if self.device.type == "cuda" else None
        self.opened: dict[bytes, int] = {}

    def reserve(self) -> int:
        """Return the index of a new entry of ``rank_data``."""
        if (self.used + 1) * _ENTRY > self.rank_data.numel():
            raise RuntimeError(
                f"{_OP}: rank_data must have 64 bytes for each registered buffer, got {8 * self.rank_data.numel()} "
                f"bytes, which {self.used} buffers fill"
            )
        self.used += 1
        return self.used - 1

    def write(self, entry: int, ptrs: Sequence[int]) -> None:
        self.rank_data[entry * _ENTRY : entry * _ENTRY + self.world] = torch.tensor(list(ptrs), dtype=torch.int64)

    def check(self) -> None:
        if self.record is not None and not self.broken and int(self.record[0]):
            _, late, call, _ = self.record.tolist()
            self.broken = self.late(late, call & 0xFFFFFFFF)
        if self.broken:
            raise CommTimeoutError(f"{self.broken}; dispose of the handle")

    def late(self, late: int, call: int) -> str:
        return (
            f"{_OP}: rank {late} must enter call {call} within {self.seconds:g} s, rank {self.rank} got no flag of it"
        )

    def run(self, inp: torch.Tensor, out: torch.Tensor, entry: int, num_ctas: int) -> None:
        self.check()
        nbytes = inp.numel() * inp.element_size()
        limit = next(most for ranks, most in _TWO_SHOT_BYTES.items() if self.world <= ranks)
        inputs = self.rank_data.data_ptr() + 8 * _ENTRY * entry
        record = 0 if self.record is None else self.record.data_ptr()
        function = get_vllm_ar_module(self.device.type).vllm_all_reduce
        stage, start = 0, time.monotonic()
        while True:
            outcome = function(
                *(inp, out, self.heads, self.rank, inputs, nbytes > limit, num_ctas, stage, _WAIT_US),
                *(int(self.seconds * 1e9), record),
            )
            if outcome == -1:
                return
            call = ctypes.c_uint32.from_address(int(self.heads[self.rank])).value + 1
            if outcome >= 256:
                raise ArgumentError(
                    f"{_OP}: inp must have as many elements of one dtype on all ranks, rank {self.rank} got "
                    f"{inp.numel()} of {inp.dtype}, and rank {outcome - 256} others, in call {call - 1}"
                )
            if outcome >= 128:
                self.broken = self.late(outcome - 128, call) + ", as another rank found"
            elif self.seconds and time.monotonic() - start > self.seconds:
                self.broken = self.late(outcome % 64, call)
                for head in self.heads.tolist():
                    ctypes.c_uint32.from_address(head + _ABORTED).value = 1 + outcome % 64
            self.check()
            stage = outcome // 64 + 1


_handles: dict[int, _CustomAllReduce] = {}
_numbers = itertools.count(1)


def _of(op: str, fa: int) -> _CustomAllReduce:
    found = _handles.get(fa)
    if found is None:
        raise ArgumentError(f"{op}: fa must be a handle of vllm_init_custom_ar that is not disposed of, got {fa!r}")
    return found


def meta_size() -> int:
    """Return the bytes in front of the scratch of a rank's shared memory.

    Examples
    --------
    >>> flashinfer.comm.vllm_meta_size()
    512
    """
    return _META_BYTES


def init_custom_ar(ipc_tensors: Sequence[int], rank_data: torch.Tensor, rank: int, full_nvlink: bool) -> int:
    """Return a handle for the ranks whose shared memory begins at the addresses ``ipc_tensors``.

    Each has :func:`meta_size` zero bytes (:func:`~.cuda_ipc.create_shared_buffer` makes them), and behind them as many
    bytes as the largest message. ``rank_data``: uint8 on the device of the tensors, 64 bytes for each registered input.
    ``full_nvlink`` may be False for two ranks only.
    """
    op, world = "vllm_init_custom_ar", len(ipc_tensors)
    if world > _MAX_WORLD:
        raise ArgumentError(f"{op}: world size > {_MAX_WORLD} is not supported: ipc_tensors must be fewer, got {world}")
    if world < 2 or world % 2:
        raise ArgumentError(f"{op}: Odd num gpus is not supported: ipc_tensors must be 2, 4, 6 or 8, got {world}")
    if not 0 <= rank < world:
        raise ArgumentError(f"{op}: rank must be in [0, {world}), got {rank}")
    if not full_nvlink and world > 2:
        raise ArgumentError(f"{op}: full_nvlink must be True for more than 2 ranks, got False for {world}")
    if rank_data.dtype != torch.uint8 or not rank_data.is_contiguous() or rank_data.numel() < 8 * _ENTRY:
        raise ArgumentError(f"{op}: rank_data must be contiguous uint8 of 64 bytes or more, got {rank_data.dtype}")
    if rank_data.numel() % 8 or rank_data.data_ptr() % 8:
        raise ArgumentError(f"{op}: rank_data must be whole 8 bytes, got {rank_data.numel()} bytes")
    number = next(_numbers)
    _handles[number] = _CustomAllReduce(ipc_tensors, rank_data, rank)
    return number


def dispose(fa: int) -> None:
    """Forget a handle; the memory belongs to the caller. A second call does nothing."""
    made = _handles.pop(fa, None)
    if made is not None and made.opened:
        from .memory.cuda import driver

        torch.cuda.synchronize(made.device)
        for address in made.opened.values():
            driver.cuIpcCloseMemHandle(ctypes.c_uint64(address))


def register_buffer(fa: int, fake_ipc_ptrs: Sequence[int]) -> None:
    """Make inputs at these addresses, one per rank, known; the own one is what :func:`all_reduce` finds them by."""
    made = _of("vllm_register_buffer", fa)
    if len(fake_ipc_ptrs) != made.world:
        raise ArgumentError(
            f"vllm_register_buffer: fake_ipc_ptrs must be {made.world} addresses, got {len(fake_ipc_ptrs)}"
        )
    entry = made.reserve()
    made.write(entry, fake_ipc_ptrs)
    made.entries[fake_ipc_ptrs[made.rank]] = entry


@flashinfer_api(trace=vllm_all_reduce_trace)
def all_reduce(
    fa: int, inp: torch.Tensor, out: torch.Tensor, reg_buffer: int, reg_buffer_sz_bytes: int, num_ctas: int
) -> None:
    """Write the sum of ``inp`` over the ranks to ``out``: float32, in rank order, rounded once.

    Parameters
    ----------
    fa : int
        Handle of :func:`init_custom_ar`.
    inp, out : torch.Tensor
        float16, bfloat16 or float32, contiguous, a multiple of 16 bytes; apart from each other.
    reg_buffer, reg_buffer_sz_bytes : int
        Address and size of a registered buffer, into which ``inp`` is copied. 0 and 0: ``inp`` itself is registered, or
        is being captured in a graph.
    num_ctas : int
        Most CTAs, up to 36.

    Examples
    --------
    Two ranks that are threads of this process:

    >>> from flashinfer.comm.local_ranks import call_on_ranks
    >>> def work(comm):
    ...     meta, data = (flashinfer.comm.create_shared_buffer(1024, comm, device="cpu") for _ in range(2))
    ...     table = torch.zeros(64, dtype=torch.uint8)
    ...     fa = flashinfer.comm.vllm_init_custom_ar(meta, table, comm.Get_rank(), True)
    ...     flashinfer.comm.vllm_register_buffer(fa, data)
    ...     x, out = torch.full((8,), 1.0 + comm.Get_rank()), torch.empty(8)
    ...     flashinfer.comm.vllm_all_reduce(fa, x, out, data[comm.Get_rank()], 1024, 36)
    ...     comm.barrier()
    ...     flashinfer.comm.vllm_dispose(fa)
    ...     for one in (meta, data):
    ...         flashinfer.comm.free_shared_buffer(one)
    ...     return out[0].item()
    >>> call_on_ranks(2, work)
    [3.0, 3.0]
    """
    made = _of(_OP, fa)
    if not 1 <= num_ctas <= _MAX_CTAS:
        raise ArgumentError(f"{_OP}: num_ctas must be from 1 to {_MAX_CTAS}, got {num_ctas}")
    if inp.device != made.device:
        raise ArgumentError(f"{_OP}: inp must be on {made.device} (where rank_data is), got {inp.device}")
    nbytes = inp.numel() * inp.element_size()
    if reg_buffer and nbytes > reg_buffer_sz_bytes:
        raise ArgumentError(
            f"{_OP}: inp must fit in reg_buffer ({reg_buffer_sz_bytes} bytes, reg_buffer_sz_bytes), got {nbytes}"
        )
    key = reg_buffer or inp.data_ptr()
    entry = made.entries.get(key)
    if entry is None:
        if reg_buffer or made.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                f"{_OP}: buffer address {key:#x} is not registered: register_buffer must be called first"
            )
        entry = made.reserve()  # its addresses are written by register_graph_buffers, before the graph runs
        made.captured.append((key, entry))
    if reg_buffer and inp.numel():
        _bytes_at(reg_buffer, nbytes, made.device).copy_(inp.contiguous().view(-1).view(torch.uint8))
    made.run(inp, out, entry, num_ctas)


def _bytes_at(ptr: int, nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        from .memory.cuda import tensor_at

        return tensor_at(ptr, nbytes, device)
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(ptr), dtype=torch.uint8)


def get_graph_buffer_ipc_meta(fa: int) -> tuple[list[int], list[int]]:
    """Return handles, 64 bytes for each input that graphs have captured since the last registration, and offsets."""
    made = _of("vllm_get_graph_buffer_ipc_meta", fa)
    handles: list[int] = []
    offsets: list[int] = []
    for ptr, _ in made.captured:
        from .memory.cuda import allocation_of, ipc_handle_of

        base = allocation_of(ptr)
        handles += ipc_handle_of(base)
        offsets.append(ptr - base)
    return handles, offsets


def register_graph_buffers(fa: int, handles: Sequence[Sequence[int]], offsets: Sequence[Sequence[int]]) -> None:
    """Write the addresses of captured inputs, from what all ranks got from :func:`get_graph_buffer_ipc_meta`."""
    op = "vllm_register_graph_buffers"
    made = _of(op, fa)
    count = len(made.captured)
    for rank, (one, places) in enumerate(zip(handles, offsets, strict=True)):
        if len(one) != 64 * count or len(places) != count:
            raise ArgumentError(
                f"{op}: handles must have 64 bytes for each of {count} captured buffers, and offsets a number, got "
                f"{len(one)} bytes and {len(places)} of rank {rank}"
            )
    for i, (ptr, entry) in enumerate(made.captured):
        ptrs = []
        for rank in range(made.world):
            handle = bytes(handles[rank][64 * i : 64 * (i + 1)])
            ptrs.append(ptr if rank == made.rank else _opened(made, handle) + offsets[rank][i])
        made.write(entry, ptrs)
    made.captured.clear()


def _opened(made: _CustomAllReduce, handle: bytes) -> int:
    """Return the address of an allocation of a peer; each is opened once."""
    from .memory.cuda import open_ipc_handle

    if handle not in made.opened:
        made.opened[handle] = open_ipc_handle(handle)
    return made.opened[handle]
