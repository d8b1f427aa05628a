# SPDX-License-Identifier: Apache-2.0
"""Questions to NVML, the driver's management library. They do not initialise CUDA, so a fork may still follow."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Iterator, Optional

__all__ = ["nvml_session", "visible_capabilities"]

LIBRARY = "libnvidia-ml.so.1"
_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE

Capability = tuple[int, int]


@contextlib.contextmanager
def nvml_session() -> Iterator[Optional[ctypes.CDLL]]:
    """Open the library for the block; ``None`` without a driver."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
        is_open = nvml.nvmlInit_v2() == 0
    except (OSError, AttributeError):
        is_open = False
    if not is_open:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def visible_capabilities() -> Optional[set[Capability]]:
    """Return the capabilities of the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, or ``None`` if NVML cannot tell.

    The caller knows that a GPU is visible. NVML counts in the order of the bus; without
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` CUDA puts the fastest GPU first, and a list of numbers means other GPUs. This
    matters only where the GPUs of a machine differ, and is answered by ``None`` there.
    """
    with nvml_session() as nvml:
        gpus = _list(nvml) if nvml is not None else []
    capabilities = {capability for capability, _ in gpus}
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")  # a variable of the driver, none of ours
    if len(capabilities) > 1 and listed is not None:
        return _chosen(gpus, [entry.strip() for entry in listed.split(",")])
    return capabilities or None


def _list(nvml: ctypes.CDLL) -> list[tuple[Capability, str]]:
    """Return capability and UUID of each GPU in the order of the bus; empty if one of them does not answer."""
    count = ctypes.c_uint()
    try:
        failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0
        gpus = [_ask(nvml, index) for index in range(0 if failed else count.value)]
    except AttributeError:  # a library without one of these functions
        return []
    known = [gpu for gpu in gpus if gpu is not None]
    return known if len(known) == len(gpus) else []


def _ask(nvml: ctypes.CDLL, index: int) -> Optional[tuple[Capability, str]]:
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    uuid = ctypes.create_string_buffer(_UUID_BYTES)
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return None
    if nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) != 0:
        return None
    if nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_UUID_BYTES)) != 0:
        return None
    return (major.value, minor.value), uuid.value.decode()


def _chosen(gpus: list[tuple[Capability, str]], entries: list[str]) -> Optional[set[Capability]]:
    """Return the capabilities that the entries name by number or by the start of a UUID; ``None`` if one is unclear."""
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    chosen = set()
    for entry in entries:
        if entry.isdecimal() and by_bus and int(entry) < len(gpus):
            named = [gpus[int(entry)]]
        else:
            named = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu[1].startswith(entry)]
        if len(named) != 1:
            return None
        chosen.add(named[0][0])
    return chosen
