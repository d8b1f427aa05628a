# SPDX-License-Identifier: Apache-2.0
"""Input lists that the timed calls of a trial take in turn, so that no call finds its inputs in the cache."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch

from .._runtime.integer_math import ceil_div, round_up
from ..testing.cold_cache import copy_inputs, distinct_bytes, tensors_in
from .profiles import TuningConfig

__all__ = ["input_lists"]

_ALIGNMENT = 256  # bytes, as torch's allocator aligns
_CACHES = 5  # copies together span the cache this many times, so the first copy has been evicted

CacheSize = Callable[[torch.device], int]


def input_lists(inputs: Sequence[Any], config: TuningConfig, repeat: int, cache_size: CacheSize) -> list[list[Any]]:
    """Return the inputs alone; copies of them for a cold cache; or, with an arena, one list per timed call."""
    own = list(inputs)
    in_arena = sorted({*config.profile_arena_input_indices, *config.value_aware_input_indices})
    if in_arena:
        return _arena_lists(own, in_arena, repeat, cache_size)
    return _copies(own, repeat, cache_size) if config.use_cold_l2_cache else [own]


def _copies(inputs: list[Any], repeat: int, cache_size: CacheSize) -> list[list[Any]]:
    """Return the inputs and enough copies to span the cache ``_CACHES`` times, but at most one list per call."""
    tensors = list(tensors_in(inputs))
    size = distinct_bytes(tensors)
    count = min(ceil_div(_CACHES * cache_size(tensors[0].device), size), repeat) if size else 1
    return [inputs, *(copy_inputs(inputs, cuda_only=False) for _ in range(count - 1))]


def _arena_lists(inputs: list[Any], indices: Sequence[int], repeat: int, cache_size: CacheSize) -> list[list[Any]]:
    """Return lists in which the inputs ``indices`` are copies, placed alternately in two buffers."""
    lists = [list(inputs) for _ in range(max(repeat, 1))]
    for device in {inputs[i].device: None for i in indices if isinstance(inputs[i], torch.Tensor)}:
        placed = [i for i in indices if isinstance(inputs[i], torch.Tensor) and inputs[i].device == device]
        lane_bytes = sum(round_up(_span(inputs[i]) * inputs[i].itemsize, _ALIGNMENT) for i in placed)
        lanes = ceil_div(len(lists), 2)
        stride = round_up(max(lane_bytes, 2 * cache_size(device) // lanes + 1), _ALIGNMENT)
        buffers = [torch.empty(lanes * stride, dtype=torch.uint8, device=device) for _ in range(2)]
        for turn, copied in enumerate(lists):
            begin = turn // 2 * stride
            for i in placed:
                copied[i], begin = _copy_to(buffers[turn % 2], begin, inputs[i])
    return lists


def _span(tensor: torch.Tensor) -> int:
    """Return the number of elements in memory from the first to the last element, gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _copy_to(buffer: torch.Tensor, begin: int, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Copy with the same strides to byte ``begin``; return the copy and the byte at which the next copy may begin."""
    span = _span(tensor)
    end = begin + span * tensor.itemsize
    place = buffer[begin:end].view(tensor.dtype)
    place.copy_(tensor.as_strided((span,), (1,), tensor.storage_offset()))
    return place.as_strided(tensor.shape, tensor.stride(), place.storage_offset()), round_up(end, _ALIGNMENT)
