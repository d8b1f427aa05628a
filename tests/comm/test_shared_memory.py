# SPDX-License-Identifier: Apache-2.0
"""Memory under addresses that programs use themselves: shared buffers, symmetric memory, handles, the CUDA runtime."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from flashinfer.comm import create_shared_buffer, cuda_ipc, free_shared_buffer, trtllm_mnnvl_ar
from flashinfer.comm.cuda_ipc import CudaRTLibrary, find_loaded_library
from flashinfer.comm.local_ranks import call_on_ranks, local_comms
from flashinfer.comm.mnnvl import (
    HandleExchanger,
    McastGPUBuffer,
    SymmDeviceMemory,
    handle_allgather,
    handle_broadcast,
    handle_cleanup,
    handle_close,
    make_handle_exchanger,
)

from .foreign import EngineBackend
from .ranks import held


def shared(comm):
    """Write to the memory of all ranks, over the default process group."""
    rank, world, before = comm.Get_rank(), comm.Get_size(), held()
    pointers = create_shared_buffer(1000, torch.distributed.group.WORLD, device="cpu")
    assert ctypes.string_at(pointers[rank], 1000) == bytes(1000)
    comm.barrier()
    for ptr in pointers:
        ctypes.memset(ptr + rank, 1 + rank, 1)
    comm.barrier()
    seen = ctypes.string_at(pointers[rank], world)
    comm.barrier()
    free_shared_buffer(pointers)
    assert held() == before
    with pytest.raises(ValueError, match="not given back before"):
        free_shared_buffer(pointers)
    return list(seen)


def test_shared_buffers(ranks):
    assert ranks(2).run(shared) == [[1, 2]] * 2


def test_shared_buffers_of_threads():
    def work(comm):
        pointers = create_shared_buffer(64, comm, device="cpu")
        comm.barrier()
        free_shared_buffer(pointers)
        return tuple(pointers)

    assert len(set(call_on_ranks(4, work))) == 1 and not cuda_ipc._host
    with pytest.raises(ValueError, match="size_in_bytes must be positive, got 0"):
        create_shared_buffer(0, local_comms(1)[0], device="cpu")


class _Runtime:
    """The runtime library as two ranks of one process see it; the handle of rank 1 is that of its pointer."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*given):
            self.calls.append((name, *[getattr(x, "value", x) for x in given]))
            if name == "cudaIpcOpenMemHandle":
                return ctypes.c_void_p(500)
            return {"cudaMalloc": ctypes.c_void_p(100), "cudaIpcGetMemHandle": "own"}.get(name)

        return call


class _Dist:
    """Two ranks, of which this is the second."""

    def __init__(self, peer):
        self.peer, self.calls = peer, []

    def get_world_size(self, group=None):
        return 2

    def get_rank(self, group=None):
        return 1

    def all_gather_object(self, found, given, group=None):
        self.calls.append("gather")
        found[:] = [self.peer, given]

    def barrier(self, group=None):
        self.calls.append("barrier")


def test_cuda_ipc_calls(monkeypatch):
    """One gather, one barrier; a rank that fails to allocate makes the others give back what they have."""
    runtime, dist = _Runtime(), _Dist("theirs")
    monkeypatch.setattr(cuda_ipc, "cudart", runtime)
    monkeypatch.setattr(cuda_ipc, "dist", dist)
    assert create_shared_buffer(64) == [500, 100] and dist.calls == ["gather", "barrier"]
    assert ("cudaMemset", 100, 0, 64) in runtime.calls and ("cudaIpcOpenMemHandle", "theirs") in runtime.calls
    free_shared_buffer([500, 100])
    assert runtime.calls[-2:] == [("cudaIpcCloseMemHandle", 500), ("cudaFree", 100)]
    dist = _Dist(cuda_ipc._Failure("out of memory"))
    monkeypatch.setattr(cuda_ipc, "dist", dist)
    with pytest.raises(RuntimeError, match=r"rank 0 failed to allocate 64 bytes \(out of memory\)"):
        create_shared_buffer(64)
    assert runtime.calls[-1] == ("cudaFree", 100) and dist.calls == ["gather", "barrier"]


def test_libraries_are_found_by_their_whole_name(monkeypatch, tmp_path):
    lines = [
        "/opt/stubs/libcudart.so.12",
        "/opt/libcudart-old.so",
        "/opt/libcudart-d0da41ae.so.11.0",
        "/x/libcudart.so.12",
    ]
    text = "".join(f"7f00-7f01 r--p 0 0:0 1    {line}\n" for line in lines)
    monkeypatch.setattr(cuda_ipc.Path, "read_text", lambda self: text)
    assert find_loaded_library("libcudart") == lines[2]
    assert find_loaded_library("libcudart-d0da41ae") == lines[2] and find_loaded_library("libcud") is None
    monkeypatch.setattr(cuda_ipc.Path, "read_text", lambda self: "7f00-7f01 r--p 0 0:0 1\n")
    with pytest.raises(RuntimeError, match="libcudart must be loaded by this process"):
        CudaRTLibrary()
    with pytest.raises(RuntimeError, match=r"so_file must be a library, got /no/libcudart\.so"):
        CudaRTLibrary("/no/libcudart.so")


def symmetric(comm):
    rank, world, before = comm.Get_rank(), comm.Get_size(), held()
    memory = SymmDeviceMemory(5000, world, rank, 0, EngineBackend(comm), enable_multicast=False, device="cpu")
    assert memory.get_allocation_size() == 8192 and memory.get_usable_buffer_size() == 8192 - 2048
    assert (memory.get_rank(), memory.get_world_size(), memory.mapped) == (rank, world, True)
    pointers, pads = memory.get_buffer_ptrs_host(), memory.get_signal_pad_ptrs_host()
    assert [pad - ptr for pad, ptr in zip(pads, pointers, strict=True)] == [6144] * world
    on_device = (ctypes.c_int64 * world).from_address(memory.get_buffer_ptrs_dev())
    assert list(on_device) == pointers == [memory.get_unicast_ptr(r) for r in range(world)]
    assert list((ctypes.c_int64 * world).from_address(memory.get_signal_pad_ptrs_dev())) == pads
    assert memory.get_multicast_ptr() == 0
    memory.lamport_initialize(rank, torch.float32)
    comm.barrier()
    words = [ctypes.c_uint32.from_address(ptr + at).value for ptr in pointers for at in (0, 6140, 6144)]
    comm.barrier()
    with pytest.raises(ValueError, match="rank out of range"):
        memory.get_unicast_ptr(world)
    with pytest.raises(ValueError, match="Unsupported dtype"):
        memory.lamport_initialize(rank, torch.int8)
    memory.close()
    memory.close()
    assert not memory.mapped
    del memory
    assert held() == before
    return words


def test_symmetric_memory(ranks):
    assert ranks(2).run(symmetric) == [[0x80000000, 0x80000000, 0] * 2] * 2


def test_multicast_is_refused_by_name():
    for make in (
        lambda: SymmDeviceMemory(64, 1, 0, 0, local_comms(1)[0]),
        lambda: McastGPUBuffer(64, 1, 0, torch.device("cuda", 0), local_comms(1)[0]),
    ):
        with pytest.raises(RuntimeError, match=r"^\[SymmDeviceMemory\] Device does not support multicasting\."):
            make()
    with pytest.raises(ValueError, match="buf_size must be positive, got 0"):
        SymmDeviceMemory(0, 1, 0, 0, local_comms(1)[0], False, device="cpu")
    with pytest.raises(ValueError, match=r"group_size and group_rank must be those of .* \(1 and 0\), got 2 and 0"):
        SymmDeviceMemory(64, 2, 0, 0, local_comms(1)[0], False, device="cpu")
    with pytest.warns(DeprecationWarning), pytest.raises(RuntimeError, match="needs multicast memory"):
        trtllm_mnnvl_ar.get_allreduce_mnnvl_workspace(None, torch.float16)


def handles(comm):
    rank, world = comm.Get_rank(), comm.Get_size()
    exchange = make_handle_exchanger(comm, rank, world, 0)
    own = os.memfd_create("handle")
    os.write(own, bytes([rank]))
    found = handle_allgather(exchange, own)
    seen = [os.pread(fd, 1, 0)[0] for fd in found]
    first = handle_broadcast(exchange, own, 1)
    seen.append(os.pread(first, 1, 0)[0])
    for fd in {*found, first}:
        handle_cleanup(exchange, fd)
    handle_close(exchange)
    fabric = HandleExchanger(comm, rank, world, 8)
    assert handle_allgather(fabric, rank) == list(range(world)) and handle_broadcast(fabric, rank, 1) == 1
    handle_cleanup(fabric, 0)
    return seen


def test_handles(ranks):
    assert ranks(2).run(handles) == [[0, 1, 1]] * 2
