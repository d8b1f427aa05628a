# SPDX-License-Identifier: Apache-2.0
"""Input lists that the timed calls of a trial take in turn, so that no call finds its inputs in the cache."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch

from .._runtime.errors import ArgumentError
from .._runtime.integer_math import ceil_div, round_up
from ..testing.cold_cache import copy_inputs, distinct_bytes, tensors_in
from .profiles import TuningConfig

__all__ = ["ValueProfileArena", "input_lists"]

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
    end = begin + _span(tensor) * tensor.itemsize
    place = buffer[begin:end].view(tensor.dtype)
    place.copy_(_memory(tensor))
    return place.as_strided(tensor.shape, tensor.stride(), place.storage_offset()), round_up(end, _ALIGNMENT)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from the first to the last element: elements of an expanded tensor once."""
    return tensor.as_strided((_span(tensor),), (1,), tensor.storage_offset())


def _form(x: Any) -> str:
    """Describe what a copy at the same place must share with a tensor."""
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    return f"shape {tuple(x.shape)}, strides {x.stride()} and {x.dtype}"


class ValueProfileArena:
    """Copies of inputs at fixed addresses in two buffers, together larger than twice the L2 cache.

    Timed calls take them in turn, so that each finds the same values and none of them in the cache.

    Parameters
    ----------
    inputs : Sequence[Any]
        Arguments of a call; their values are staged.
    arena_input_indices : Sequence[int]
        Inputs to copy; what is no tensor, and all other inputs, are passed through.
    num_ring_lanes : int
        Number of copies.
    l2_cache_size_bytes : int
        Size of the cache of each device.

    Examples
    --------
    >>> arena = flashinfer.autotuner.ValueProfileArena([torch.ones(4), None], (0,), 2, l2_cache_size_bytes=1024)
    >>> arena.stage([torch.zeros(4), None])
    >>> arena.inputs_for_iteration(5)[0].tolist()
    [0.0, 0.0, 0.0, 0.0]
    """

    def __init__(
        self, inputs: Sequence[Any], arena_input_indices: Sequence[int], num_ring_lanes: int, l2_cache_size_bytes: int
    ) -> None:
        if num_ring_lanes < 1:
            raise ArgumentError(f"ValueProfileArena: num_ring_lanes must be at least 1, got {num_ring_lanes}")
        self._indices = [i for i in sorted(set(arena_input_indices)) if isinstance(inputs[i], torch.Tensor)]
        self._lanes = _arena_lists(list(inputs), self._indices, num_ring_lanes, lambda _: l2_cache_size_bytes)

    def stage(self, inputs: Sequence[Any]) -> None:
        """Give all lanes the values of ``inputs``, which must have the form of the first ones."""
        for lane in self._lanes:
            for i, given in enumerate(inputs):
                if i not in self._indices:
                    lane[i] = given
                elif _form(given) != _form(lane[i]):
                    raise ArgumentError(
                        f"ValueProfileArena: input {i} must be a tensor of {_form(lane[i])}, got {_form(given)}"
                    )
                else:
                    _memory(lane[i]).copy_(_memory(given))

    def inputs_for_iteration(self, iteration: int) -> list[Any]:
        """Return the inputs of a timed call; calls ``num_ring_lanes`` apart have the same."""
        return self._lanes[iteration % len(self._lanes)]

    def iteration_inputs(self, num_iterations: int) -> list[list[Any]]:
        """Return the inputs of ``num_iterations`` timed calls."""
        return [self.inputs_for_iteration(i) for i in range(num_iterations)]
