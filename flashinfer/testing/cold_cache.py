# SPDX-License-Identifier: Apache-2.0
"""Cold caches for timing: overwrite a large buffer before a call, or give every call its own copy of the inputs."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Optional, Union

import torch

__all__ = [
    "CacheFlush",
    "calculate_rotation_count",
    "copy_inputs",
    "distinct_bytes",
    "get_l2_cache_size",
    "tensors_in",
]

Device = Union[None, str, int, torch.device]
Flush = Optional[Callable[[], None]]

# Clearing 512 MiB takes a GPU of 4 TB/s 0.13 ms (arithmetic): longer than the host needs to enqueue an eager call, so
# the GPU never waits for Python when the timed call begins. The neutral suite clears as much, so figures compare.
_FLUSH_BYTES = 512 << 20
_ROTATION_FACTOR = 5  # copies together span the cache this many times, so the first copy has been evicted
_UNKNOWN_CPU_CACHE = 32 << 20


def _resolve(device: Device) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


@functools.cache
def _cpu_cache_size() -> int:
    """Return the bytes of the last-level cache, as Linux reports it."""
    sizes = [_UNKNOWN_CPU_CACHE]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]])
    return max(sizes)


def get_l2_cache_size(device: Device = None) -> int:
    """Return the bytes of the cache in front of memory: L2 of a CUDA device, the last-level cache of a CPU.

    ``None`` means the current CUDA device, or the CPU where there is none.
    """
    device = _resolve(device)
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else _cpu_cache_size()


class CacheFlush:
    """Callable that evicts everything from the cache of ``device`` by overwriting a buffer.

    Parameters
    ----------
    device : str or torch.device, optional
        Whose cache; default as in :func:`get_l2_cache_size`.
    size_bytes : int, optional
        Size of the buffer; default at least twice the cache, where memory allows.
    """

    def __init__(self, device: Device = None, size_bytes: Optional[int] = None) -> None:
        device = _resolve(device)
        if size_bytes is None:
            size_bytes = min(max(2 * get_l2_cache_size(device), _FLUSH_BYTES), self._memory_limit(device))
        self._buffer = torch.empty(size_bytes, dtype=torch.int8, device=device)

    @staticmethod
    def _memory_limit(device: torch.device) -> int:
        if device.type != "cuda":
            return _FLUSH_BYTES  # server CPUs report 300 MiB and more, shared with other sockets' tenants
        return torch.cuda.get_device_properties(device).total_memory // 8

    def __call__(self) -> None:
        self._buffer.zero_()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor inside nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors; tensors at the same address are counted once."""
    return sum(t.nbytes for t in {t.data_ptr(): t for t in tensors}.values())


def calculate_rotation_count(tensors: Iterable[torch.Tensor], device: Device = None, min_rotations: int = 2) -> int:
    """Return the number of input copies to cycle through so that each call finds its inputs evicted from the cache.

    One when the inputs alone exceed five times the cache; otherwise as many as reach that size, and no fewer than
    ``min_rotations``. No tensors, or empty ones: one.
    """
    size = distinct_bytes(tensors)
    target = _ROTATION_FACTOR * get_l2_cache_size(device)
    if size == 0 or size >= target:
        return 1
    return max(min_rotations, -(-target // size))


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Copy with the same strides, also if the tensor is a slice of a wider buffer."""
    if tensor.numel() == 0:
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((span,), (1,), tensor.storage_offset()).clone()
    return flat.as_strided(tensor.shape, tensor.stride())


def copy_inputs(value: Any, cuda_only: bool = True) -> Any:
    """Copy a nested structure and its (CUDA) tensors; one tensor met twice stays one tensor. The rest is shared."""
    memo: dict[int, torch.Tensor] = {}

    def copy(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if cuda_only and not item.is_cuda:
                return item
            if id(item) not in memo:
                memo[id(item)] = _copy_tensor(item)
            return memo[id(item)]
        if isinstance(item, dict):
            return {key: copy(entry) for key, entry in item.items()}
        if isinstance(item, (list, tuple)):
            return type(item)(map(copy, item)) if not hasattr(item, "_fields") else type(item)(*map(copy, item))
        return item

    return copy(value)
