# SPDX-License-Identifier: Apache-2.0
"""Buffers that every rank of a group maps: CUDA IPC through the runtime library; without a GPU, memory of the host."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Optional, Union

import torch
import torch.distributed as dist

from .._runtime.errors import ArgumentError
from .comm_backend import TorchDistBackend
from .memory.peers import PeerMemory, create_peer_memory

__all__ = ["CudaRTLibrary", "create_shared_buffer", "cudaIpcMemHandle_t", "find_loaded_library", "free_shared_buffer"]


class cudaIpcMemHandle_t(ctypes.Structure):
    """Handle of an allocation that another process can open."""

    _fields_ = [("internal", ctypes.c_byte * 64)]


class Function(NamedTuple):
    """A function of the runtime library."""

    name: str
    restype: Any
    argtypes: list[Any]


def find_loaded_library(lib_name: str) -> Optional[str]:
    """Return the path of a library that this process has mapped, by its whole name; stubs do not count."""
    wanted = re.compile(rf"{re.escape(lib_name)}(-[0-9a-f]+)?\.so(\.\d+)*")
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :].removesuffix(" (deleted)") if "/" in line else ""
        if wanted.fullmatch(path.rpartition("/")[2]) and "/stubs/" not in path:
            return path
    return None


class CudaRTLibrary:
    """Functions of the CUDA runtime library through ctypes; a call that fails raises RuntimeError."""

    exported_functions: ClassVar[list[Function]] = [
        Function("cudaSetDevice", ctypes.c_int, [ctypes.c_int]),
        Function("cudaDeviceSynchronize", ctypes.c_int, []),
        Function("cudaDeviceReset", ctypes.c_int, []),
        Function("cudaGetErrorString", ctypes.c_char_p, [ctypes.c_int]),
        Function("cudaMalloc", ctypes.c_int, [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]),
        Function("cudaFree", ctypes.c_int, [ctypes.c_void_p]),
        Function("cudaMemset", ctypes.c_int, [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]),
        Function("cudaMemcpy", ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]),
        Function("cudaIpcGetMemHandle", ctypes.c_int, [ctypes.POINTER(cudaIpcMemHandle_t), ctypes.c_void_p]),
        Function(
            "cudaIpcOpenMemHandle", ctypes.c_int, [ctypes.POINTER(ctypes.c_void_p), cudaIpcMemHandle_t, ctypes.c_uint]
        ),
        Function("cudaIpcCloseMemHandle", ctypes.c_int, [ctypes.c_void_p]),
    ]

    def __init__(self, so_file: Optional[str] = None) -> None:
        path = so_file or find_loaded_library("libcudart")
        if path is None:
            raise RuntimeError(
                "CudaRTLibrary: libcudart must be loaded by this process (a CUDA build of torch does), or so_file be "
                "given, got neither"
            )
        try:
            self.lib = ctypes.CDLL(path)
        except OSError as error:
            raise RuntimeError(f"CudaRTLibrary: so_file must be a library, got {path} ({error})") from None
        self.funcs: dict[str, Any] = {}
        for one in self.exported_functions:
            function = getattr(self.lib, one.name)
            function.restype, function.argtypes = one.restype, one.argtypes
            self.funcs[one.name] = function

    def CUDART_CHECK(self, result: int) -> None:
        """Raise RuntimeError for a result that is no success."""
        if result != 0:
            raise RuntimeError(f"CUDART error: {self.cudaGetErrorString(result)}")

    def cudaGetErrorString(self, error: int) -> str:
        return self.funcs["cudaGetErrorString"](error).decode()

    def cudaSetDevice(self, device: int) -> None:
        self.CUDART_CHECK(self.funcs["cudaSetDevice"](device))

    def cudaDeviceSynchronize(self) -> None:
        self.CUDART_CHECK(self.funcs["cudaDeviceSynchronize"]())

    def cudaDeviceReset(self) -> None:
        self.CUDART_CHECK(self.funcs["cudaDeviceReset"]())

    def cudaMalloc(self, size: int) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        self.CUDART_CHECK(self.funcs["cudaMalloc"](ctypes.byref(pointer), size))
        return pointer

    def cudaFree(self, devPtr: ctypes.c_void_p) -> None:
        self.CUDART_CHECK(self.funcs["cudaFree"](devPtr))

    def cudaMemset(self, devPtr: ctypes.c_void_p, value: int, count: int) -> None:
        self.CUDART_CHECK(self.funcs["cudaMemset"](devPtr, value, count))

    def cudaMemcpy(self, dst: ctypes.c_void_p, src: ctypes.c_void_p, count: int) -> None:
        by_address = 4  # cudaMemcpyDefault: the runtime sees from the addresses where they are
        self.CUDART_CHECK(self.funcs["cudaMemcpy"](dst, src, count, by_address))

    def cudaIpcGetMemHandle(self, devPtr: ctypes.c_void_p) -> cudaIpcMemHandle_t:
        handle = cudaIpcMemHandle_t()
        self.CUDART_CHECK(self.funcs["cudaIpcGetMemHandle"](ctypes.byref(handle), devPtr))
        return handle

    def cudaIpcOpenMemHandle(self, handle: cudaIpcMemHandle_t) -> ctypes.c_void_p:
        pointer, lazy_peer_access = ctypes.c_void_p(), 1
        self.CUDART_CHECK(self.funcs["cudaIpcOpenMemHandle"](ctypes.byref(pointer), handle, lazy_peer_access))
        return pointer

    def cudaIpcCloseMemHandle(self, devPtr: ctypes.c_void_p) -> None:
        self.CUDART_CHECK(self.funcs["cudaIpcCloseMemHandle"](devPtr))


class _LazyLibrary:
    """The library, loaded when the first function is read: importing this module needs no GPU."""

    def __getattr__(self, name: str) -> Any:
        library = CudaRTLibrary()
        self.__dict__.update({one.name: getattr(library, one.name) for one in library.exported_functions})
        return getattr(library, name)


cudart: Any = _LazyLibrary()


class _Failure(NamedTuple):
    """Text that a rank sends in place of a handle."""

    text: str


#: Memory of the host behind addresses. Ranks that are threads have the same ones, and each gives one back.
_host: dict[tuple[int, ...], list[PeerMemory]] = {}
_host_lock = threading.Lock()


def create_shared_buffer(
    size_in_bytes: int, group: Optional[Any] = None, *, device: Union[str, torch.device, None] = None
) -> list[int]:
    """Allocate ``size_in_bytes`` zero bytes on every rank of a group and return their addresses in this process.

    Every rank calls it. Without a GPU (or with ``device="cpu"``) the memory is shared memory of the host.

    Examples
    --------
    >>> from flashinfer.comm.local_ranks import local_comms
    >>> pointers = flashinfer.comm.create_shared_buffer(256, local_comms(1)[0], device="cpu")
    >>> len(pointers)
    1
    >>> flashinfer.comm.free_shared_buffer(pointers)
    """
    op = "create_shared_buffer"
    if size_in_bytes <= 0:
        raise ArgumentError(f"{op}: size_in_bytes must be positive, got {size_in_bytes}")
    on_gpu = torch.cuda.is_available() or not isinstance(cudart, _LazyLibrary)
    if torch.device(device or ("cuda" if on_gpu else "cpu")).type == "cpu":
        comm = group if hasattr(group, "Get_rank") else TorchDistBackend(group)
        memory = create_peer_memory(comm, size_in_bytes, "cpu", op=op, initialise=lambda own: own.zero_())
        with _host_lock:
            _host.setdefault(memory.ptrs, []).append(memory)
        return list(memory.ptrs)
    pointer, handle = None, None
    try:
        pointer = cudart.cudaMalloc(size_in_bytes)
        cudart.cudaMemset(pointer, 0, size_in_bytes)
        cudart.cudaDeviceSynchronize()
        handle = cudart.cudaIpcGetMemHandle(pointer)
    except RuntimeError as error:  # the other ranks are told, which wait for this one
        handle = _Failure(str(error))
    world, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
    handles: list[Any] = [None] * world
    dist.all_gather_object(handles, handle, group=group)
    opened: list[int] = []
    try:
        for other, one in enumerate(handles):
            if isinstance(one, _Failure):
                raise RuntimeError(f"{op}: rank {other} failed to allocate {size_in_bytes} bytes ({one.text})")
        for other, one in enumerate(handles):
            opened.append(pointer.value if other == rank else cudart.cudaIpcOpenMemHandle(one).value)  # type: ignore[union-attr]
    except RuntimeError:
        for other, address in enumerate(opened):
            if other != rank:
                cudart.cudaIpcCloseMemHandle(ctypes.c_void_p(address))
        if pointer is not None:
            cudart.cudaFree(pointer)
        raise
    finally:
        dist.barrier(group=group)
    return opened


def free_shared_buffer(pointers: list[int], group: Optional[Any] = None) -> None:
    """Give the memory of :func:`create_shared_buffer` back; not collective."""
    with _host_lock:
        kept = _host.get(tuple(pointers))
        memory = kept.pop() if kept else None
        if kept is not None and not kept:
            del _host[tuple(pointers)]
    if memory is not None:
        memory.close()
        return
    if not torch.cuda.is_available() and isinstance(cudart, _LazyLibrary):
        raise ArgumentError(
            "free_shared_buffer: pointers must be those of create_shared_buffer, not given back before, got others"
        )
    rank = dist.get_rank(group=group)
    for other, pointer in enumerate(pointers):
        if other == rank:
            cudart.cudaFree(ctypes.c_void_p(pointer))
        else:
            cudart.cudaIpcCloseMemHandle(ctypes.c_void_p(pointer))
