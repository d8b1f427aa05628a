# SPDX-License-Identifier: Apache-2.0
"""Memory of GPUs that other processes map: calls of the CUDA driver through ctypes, which needs no package."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

__all__ = ["IpcProvider", "VmmProvider", "allocation_of", "driver", "ipc_handle_of", "open_ipc_handle", "tensor_at"]

_Pointer, _Handle = ctypes.c_uint64, ctypes.c_uint64
_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("flags", _Flags),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


class Driver:
    """Functions of libcuda; a call that fails raises RuntimeError with the driver's words."""

    def __init__(self) -> None:
        self._library: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._library is None:
            try:
                self._library = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise RuntimeError(f"{name}: the driver libcuda.so.1 must be installed ({error})") from None
        function = getattr(self._library, name)

        def call(*arguments: Any) -> None:
            status = function(*arguments)
            if status != 0:
                text = ctypes.c_char_p()
                self._library.cuGetErrorString(status, ctypes.byref(text))
                raise RuntimeError(f"{name} failed with {status} ({(text.value or b'unknown error').decode()})")

        setattr(self, name, call)
        return call


driver = Driver()


class _Bytes:
    """An address as torch takes it."""

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "version": 3}


def tensor_at(ptr: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return the bytes at a device address as a tensor that owns nothing."""
    return torch.as_tensor(_Bytes(ptr, nbytes), device=device)


def _round_up(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit


def allocation_of(ptr: int) -> int:
    """Return where the allocation begins that an address is in."""
    base, size = _Pointer(), ctypes.c_size_t()
    driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), _Pointer(ptr))
    return base.value


def ipc_handle_of(base: int) -> bytes:
    """Return the 64 bytes by which another process opens an allocation."""
    handle = _IpcHandle()
    driver.cuIpcGetMemHandle(ctypes.byref(handle), _Pointer(base))
    return bytes(handle)


def open_ipc_handle(handle: bytes) -> int:
    """Map the allocation behind a handle of another process and return its address."""
    address, lazy_peer_access = _Pointer(), 1
    driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), lazy_peer_access)
    return address.value


class _CudaProvider:
    """The device, and the calls that undo the allocations, of either provider."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._undo: list[Any] = []
        self.own = torch.empty(0, dtype=torch.uint8)
        torch.cuda.synchronize(self._device)  # makes the context of the device current in this thread

    def settle(self) -> None:
        pass

    def close(self) -> None:
        if not self._undo:
            return
        self.own = torch.empty(0, dtype=torch.uint8)
        torch.cuda.synchronize(self._device)  # a kernel may still read what is unmapped next
        while self._undo:
            function, *arguments = self._undo.pop()
            function(*arguments)


class VmmProvider(_CudaProvider):
    """Allocations of the driver, each mapped at an address of our choice: peers keep them if their owner dies."""

    uses_descriptors = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._location = _Location(1, self._device.index)
        self._prop = _AllocationProp(1, _POSIX_FD, self._location, None, _Flags())
        self._bytes, self._fd = 0, -1
        self._range: Any = None  # address of rank 0, stride
        self._rank = 0

    def reserve(self, rank: int, size: int, stride: int) -> None:
        self._range, self._rank = (self._addresses(size * stride), stride), rank

    def _addresses(self, nbytes: int) -> int:
        address, size = _Pointer(), ctypes.c_size_t(nbytes)
        driver.cuMemAddressReserve(ctypes.byref(address), size, ctypes.c_size_t(0), _Pointer(0), ctypes.c_uint64(0))
        self._undo.append((driver.cuMemAddressFree, address, size))
        return address.value

    def _map(self, handle: ctypes.c_uint64, rank: int) -> int:
        self._undo.append((driver.cuMemRelease, handle))
        size = ctypes.c_size_t(self._bytes)
        if self._range is None:
            address = _Pointer(self._addresses(self._bytes))
        else:
            address = _Pointer(self._range[0] + rank * self._range[1])
        driver.cuMemMap(address, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        self._undo.append((driver.cuMemUnmap, address, size))
        access = _Access(self._location, 3)
        driver.cuMemSetAccess(address, size, ctypes.byref(access), ctypes.c_size_t(1))
        return address.value

    def allocate(self, nbytes: int) -> int:
        unit = ctypes.c_size_t()
        driver.cuMemGetAllocationGranularity(ctypes.byref(unit), ctypes.byref(self._prop), 0)
        self._bytes = _round_up(nbytes, unit.value)
        handle = _Handle()
        driver.cuMemCreate(
            ctypes.byref(handle), ctypes.c_size_t(self._bytes), ctypes.byref(self._prop), ctypes.c_uint64(0)
        )
        self.own = tensor_at(self._map(handle, self._rank), nbytes, self._device)
        fd = ctypes.c_int(-1)
        driver.cuMemExportToShareableHandle(ctypes.byref(fd), handle, _POSIX_FD, ctypes.c_uint64(0))
        self._fd = fd.value
        os.set_inheritable(self._fd, False)
        return self._fd

    def open(self, handle: int, peer: int) -> int:
        imported = _Handle()
        try:
            driver.cuMemImportFromShareableHandle(ctypes.byref(imported), ctypes.c_void_p(handle), _POSIX_FD)
        finally:
            os.close(handle)
        return self._map(imported, peer)

    def settle(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def close(self) -> None:
        self.settle()
        super().close()


class IpcProvider(_CudaProvider):
    """Ordinary allocations and their CUDA IPC handles."""

    uses_descriptors = False

    def allocate(self, nbytes: int) -> bytes:
        address = _Pointer()
        driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
        self._undo.append((driver.cuMemFree_v2, address))
        self.own = tensor_at(address.value, nbytes, self._device)
        return ipc_handle_of(address.value)

    def reserve(self, rank: int, size: int, stride: int) -> None:
        raise RuntimeError("memory behind CUDA IPC handles has no address of our choice")

    def open(self, handle: bytes, peer: int) -> int:
        address = open_ipc_handle(handle)
        self._undo.append((driver.cuIpcCloseMemHandle, _Pointer(address)))
        return address
