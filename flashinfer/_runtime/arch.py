# SPDX-License-Identifier: Apache-2.0
"""Devices: named sets of compute capabilities, and probes of the GPUs of this machine.

A capability is ``major * 10 + minor``: 90 is a Hopper. The host is a device like the others; its capability is
``CPU``, so an op that runs there says ``@supported_compute_capability([CPU, *TURING_ON])``.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterable, Optional, TypeVar, Union

import torch

from . import nvml
from .codegen_wrapper import traced_as_constant
from .errors import ArgumentError
from .probes import probes

__all__ = [
    "ADA_ON",
    "ALL_CCS",
    "AMPERE_ON",
    "AMPERE_ON_MAJORS",
    "BLACKWELL",
    "BLACKWELL_MAJORS",
    "BLACKWELL_ON",
    "BLACKWELL_ON_MAJORS",
    "CPU",
    "HOPPER",
    "HOPPER_MAJORS",
    "HOPPER_ON",
    "HOPPER_ON_MAJORS",
    "SM12X",
    "SM12X_MAJORS",
    "TURING_ON",
    "TURING_ON_MAJORS",
    "capability_of",
    "device_support_pdl",
    "get_compute_capability",
    "get_default_generators",
    "get_device_index",
    "get_device_name",
    "get_device_properties",
    "get_device_sm_count",
    "get_gpu_memory_bandwidth",
    "get_shared_bytes_per_block_optin",
    "get_visible_capabilities",
    "is_cvt_rs_supported",
    "is_sm100a_supported",
    "is_sm100f_supported",
    "is_sm110a_supported",
    "is_sm120a_supported",
    "is_sm120f_supported",
    "is_sm121a_supported",
    "is_sm12x_supported",
    "is_sm90a_supported",
]

T = TypeVar("T")
Device = Union[torch.device, str, int]

CPU = 0

ALL_CCS = (75, 80, 86, 87, 88, 89, 90, 100, 103, 107, 110, 120, 121)
TURING_ON = ALL_CCS
AMPERE_ON = tuple(cc for cc in ALL_CCS if cc >= 80)
ADA_ON = tuple(cc for cc in ALL_CCS if cc >= 89)
HOPPER_ON = tuple(cc for cc in ALL_CCS if cc >= 90)
BLACKWELL_ON = tuple(cc for cc in ALL_CCS if cc >= 100)
HOPPER = (90,)
BLACKWELL = (100, 103, 107, 110)  # the chips with tcgen05; 12x has Blackwell's name but not its tensor cores
SM12X = (120, 121)


def _majors(ccs: Iterable[int]) -> list[int]:
    return sorted({cc // 10 for cc in ccs})


# The same sets as CompilationContext.get_nvcc_flags_list takes them.
TURING_ON_MAJORS = _majors(TURING_ON)
AMPERE_ON_MAJORS = _majors(AMPERE_ON)
HOPPER_ON_MAJORS = _majors(HOPPER_ON)
HOPPER_MAJORS = _majors(HOPPER)
BLACKWELL_ON_MAJORS = _majors(BLACKWELL_ON)
BLACKWELL_MAJORS = _majors(BLACKWELL)
SM12X_MAJORS = _majors(SM12X)


def get_device_index(device: Device) -> int:
    """Return the index of a CUDA device; a device without an index is the current device."""
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "cuda":
        raise ArgumentError(f"device must be a CUDA device, got {device}")
    return torch.cuda.current_device() if device.index is None else device.index


_RAISE: Any = object()


def _per_device(probe: Callable[[int], T], otherwise: T = _RAISE) -> Callable[[Device], T]:
    """Turn a probe of a device index into a cached function of any spelling of a device.

    ``otherwise`` is the answer for a device that is not CUDA; without it, such a device is an error.

    Written by hand because ``functools.cache`` would map "cuda" to the GPU that was current at the first call, and
    because ``device.type`` costs 0.4 us: a device seen before costs one dictionary look-up.
    """
    answers: dict[Any, T] = {}

    @functools.wraps(probe)
    def cached(device: Device) -> T:
        try:
            return answers[device]
        except KeyError:
            pass
        try:
            index = get_device_index(device)
        except ArgumentError as error:
            if otherwise is not _RAISE:
                return otherwise
            raise ArgumentError(f"{probe.__name__}: {error}") from None
        key = torch.device("cuda", index)
        if key not in answers:
            answers[key] = probe(index)
        return answers[key]

    del cached.__wrapped__  # its parameter is an index, the public one is a device
    cached.cache_clear = answers.clear  # type: ignore[attr-defined]
    return traced_as_constant(cached)


@_per_device
def get_device_properties(index: int) -> Any:
    """Cached ``torch.cuda.get_device_properties``."""
    return torch.cuda.get_device_properties(index)


@_per_device
def get_compute_capability(index: int) -> tuple[int, int]:
    """``(major, minor)`` of a CUDA device; ``ArgumentError`` for any other device."""
    return torch.cuda.get_device_capability(index)


def get_visible_capabilities() -> set[tuple[int, int]]:
    """Return the capabilities of the visible GPUs; empty without one.

    torch initialises CUDA to answer, after which children that are forked cannot use it. So NVML is asked as long as
    CUDA is not initialised, and torch only where NVML cannot tell.
    """
    count = torch.cuda.device_count()  # asks NVML too, where is_available() would call the driver
    if count == 0:
        return set()
    found = None if torch.cuda.is_initialized() else nvml.visible_capabilities()
    return found or {torch.cuda.get_device_capability(index) for index in range(count)}


@_per_device
def get_device_sm_count(index: int) -> int:
    """Number of streaming multiprocessors."""
    return get_device_properties(index).multi_processor_count


@_per_device
def get_device_name(index: int) -> str:
    """Marketing name, such as ``NVIDIA H200``."""
    return torch.cuda.get_device_name(index)


@_per_device
def get_shared_bytes_per_block_optin(index: int) -> int:
    """Most shared memory one block can ask for, in bytes."""
    return get_device_properties(index).shared_memory_per_block_optin


@_per_device
def get_gpu_memory_bandwidth(index: int) -> float:
    """Peak DRAM bandwidth in GB/s: two transfers per memory clock over the whole bus."""
    properties = get_device_properties(index)
    return 2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8 / 1e9


@_per_device
def _cuda_generator(index: int) -> torch.Generator:
    torch.cuda.init()  # torch makes the generators there
    return torch.cuda.default_generators[index]


def get_default_generators(device: Device) -> torch.Generator:
    """Return the generator that torch itself draws from on that device, CPU included."""
    if not isinstance(device, int) and torch.device(device).type == "cpu":
        return torch.default_generator
    return _cuda_generator(device)


@functools.partial(_per_device, otherwise=False)
def device_support_pdl(index: int) -> bool:
    """Return True if the device has programmatic dependent launch (capability 9.0 on); False if it is not CUDA."""
    return torch.cuda.get_device_capability(index)[0] >= 9


class _Capabilities(dict[int, int]):
    """Compute capabilities by ``tensor.get_device()``; 0 for tensors that are not on a CUDA device."""

    def __missing__(self, index: int) -> int:
        self[index] = 0
        if index >= 0 and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability(index)
            self[index] = major * 10 + minor
        return self[index]


#: ``capability_of[x.get_device()]`` is 90 for a tensor on a Hopper. Own calls may read it where no probe is replaced.
capability_of = _Capabilities()


def _target(device: Optional[Device], cuda: tuple[int, int]) -> tuple[int, int]:
    """Capability of ``device`` (default: the current one); (0, 0) without a GPU or with a torch older than ``cuda``."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return (0, 0)
    if tuple(int(part) for part in torch.version.cuda.split(".")[:2]) < cuda:
        return (0, 0)
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device())
    elif not isinstance(device, int) and torch.device(device).type != "cuda":
        return (0, 0)
    return probes.get_compute_capability(device)


def is_sm90a_supported(device: Optional[Device] = None) -> bool:
    """Hopper, and CUDA 12.3 on."""
    return _target(device, (12, 3))[0] == 9


def is_sm100a_supported(device: Optional[Device] = None) -> bool:
    """Capability 10.x, and CUDA 12.8 on."""
    return _target(device, (12, 8))[0] == 10


def is_sm100f_supported(device: Optional[Device] = None) -> bool:
    """Capability 10.x, and CUDA 12.9 on, which has family targets."""
    return _target(device, (12, 9))[0] == 10


def is_sm110a_supported(device: Optional[Device] = None) -> bool:
    """Capability 11.x, and CUDA 13.0 on."""
    return _target(device, (13, 0))[0] == 11


def is_sm120a_supported(device: Optional[Device] = None) -> bool:
    """Capability 12.0, and CUDA 12.8 on."""
    return _target(device, (12, 8)) == (12, 0)


def is_sm120f_supported(device: Optional[Device] = None) -> bool:
    """Capability 12.x, and CUDA 12.9 on, which has family targets."""
    return _target(device, (12, 9))[0] == 12


def is_sm121a_supported(device: Optional[Device] = None) -> bool:
    """Capability 12.1, and CUDA 12.9 on."""
    return _target(device, (12, 9)) == (12, 1)


def is_sm12x_supported(device: Optional[Device] = None) -> bool:
    """Capability 12.0 or 12.1, with a CUDA that compiles for it."""
    return is_sm120a_supported(device) or is_sm121a_supported(device)


def is_cvt_rs_supported(device: Optional[Device] = None) -> bool:
    """Conversions with stochastic rounding (PTX ``cvt.rs``) in hardware: 10.0 and 10.3."""
    return _target(device, (12, 8)) in ((10, 0), (10, 3))
