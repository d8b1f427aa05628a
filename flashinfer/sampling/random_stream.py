# SPDX-License-Identifier: Apache-2.0
"""Sources of random numbers: a pair (seed, offset), given by the caller or taken from a generator.

A draw is a function of seed, offset and the number of the output row (Philox4x32-10), so a pair names a reproducible
set of draws, on any device.
"""

from __future__ import annotations

import operator
from typing import Any, Optional, Union

import torch

from .._runtime.arch import get_default_generators
from .._runtime.errors import ArgumentError

__all__ = ["Number", "get_seed_and_offset", "stream_arguments", "take_from_default"]

Number = Union[int, torch.Tensor]


def get_seed_and_offset(
    increment: int, generator: Optional[torch.Generator] = None, device: Optional[torch.device] = None
) -> tuple[int, int]:
    """Take ``increment`` random numbers from a generator.

    The state of a CUDA generator is a seed and an offset. The offset moves on by ``increment``, rounded up to a
    multiple of 4, and the pair of the seed and the new offset is what is used. A CPU generator has no such pair: a
    63-bit seed is drawn from it, which moves it on by one draw whatever the increment, and the offset is 0.

    Parameters
    ----------
    increment : int
        How many numbers the caller may use.
    generator : Optional[torch.Generator]
        Default: the one torch draws from on ``device``.
    device : Optional[torch.device]
        Default: the CPU.

    Returns
    -------
    seed, offset : int
    """
    if generator is None:
        generator = get_default_generators("cpu" if device is None else device)
    if generator.device.type != "cuda":
        drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        return int(drawn), 0
    return _move_on(generator, increment)


def _move_on(generator: torch.Generator, increment: int) -> tuple[int, int]:
    offset = generator.get_offset() + (increment + 3) // 4 * 4
    generator.set_offset(offset)
    return generator.initial_seed(), offset


_cuda_generators: dict[int, torch.Generator] = {}  # keys are device indices; asking torch takes 2 us


def take_from_default(increment: int, input: torch.Tensor, device: int) -> tuple[int, int]:
    """Call :func:`get_seed_and_offset` for torch's default generator of the device of ``input``; 64-bit results.

    ``device`` is the ``cuda_index`` of ``input``, which callers know.
    """
    generator = _cuda_generators.get(device)
    if generator is not None:
        offset = generator.get_offset() + (increment + 3) // 4 * 4  # inlined _move_on: the call takes 0.1 us more
        generator.set_offset(offset)
        seed = generator.initial_seed()
    else:
        if device >= 0:
            _cuda_generators[device] = get_default_generators(input.device)
        seed, offset = get_seed_and_offset(increment, None, input.device if device >= 0 else None)
    return (seed if seed < 0x8000000000000000 else as_int64(seed)), offset


def stream_arguments(
    op: str,
    seed: Optional[Number],
    offset: Optional[Number],
    generator: Optional[torch.Generator],
    increment: int,
    input: torch.Tensor,
    batch: int,
) -> tuple[Optional[torch.Tensor], Optional[int], Optional[torch.Tensor], Optional[int]]:
    """Return ``seed`` and ``offset`` as tensor and number each. All None: the op asks the default generator."""
    if seed is None or offset is None:
        if generator is None:
            return None, None, None, None
        if not isinstance(generator, torch.Generator):
            raise ArgumentError(f"{op}: generator must be a torch.Generator, got a {type(generator).__name__}")
        seed, offset = get_seed_and_offset(increment, generator)
    if type(seed) is int and type(offset) is int:
        return None, as_int64(seed), None, as_int64(offset)
    if isinstance(seed, torch.Tensor) != isinstance(offset, torch.Tensor):
        raise ArgumentError(
            f"{op}: seed is a {type(seed).__name__} and offset a {type(offset).__name__}: seed and offset must both be "
            "tensors or both be scalars"
        )
    if isinstance(seed, torch.Tensor):
        assert isinstance(offset, torch.Tensor)
        _check_tensor(op, "seed", seed, input, batch)
        _check_tensor(op, "offset", offset, input, batch)
        return seed.contiguous(), 0, offset.contiguous(), 0
    return None, _integer(op, "seed", seed), None, _integer(op, "offset", offset)


def _integer(op: str, name: str, x: Any) -> int:
    """Convert any type of integer, such as numpy's, to a signed 64-bit number."""
    try:
        return as_int64(operator.index(x))
    except TypeError as error:
        raise ArgumentError(f"{op}: {name} must be an int or a tensor, got a {type(x).__name__}") from error


def as_int64(x: int) -> int:
    """Reinterpret a number as a signed 64-bit integer: the result has the same low 64 bits."""
    if -0x8000000000000000 <= x < 0x8000000000000000:
        return x
    x &= 0xFFFFFFFFFFFFFFFF
    return x - 0x10000000000000000 if x >= 0x8000000000000000 else x


def _check_tensor(op: str, name: str, t: torch.Tensor, input: torch.Tensor, batch: int) -> None:
    if t.device != input.device:
        raise ArgumentError(f"{op}: {name} must be on {input.device} (the device of the input), got {t.device}")
    if t.dtype not in (torch.int64, torch.uint64):
        raise ArgumentError(f"{op}: {name} must have dtype int64 or uint64, got {t.dtype}")
    if t.ndim != 1 or t.shape[0] not in (1, batch):
        raise ArgumentError(f"{op}: {name} must have shape (1,) or ({batch},), got {tuple(t.shape)}")
