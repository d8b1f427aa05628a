# SPDX-License-Identifier: Apache-2.0
"""Calls of ``run`` that are kept: the next call with the same plan, tables and parameters gives new tensors only.

Looking at a dozen tensors and numbers is most of what a launch costs on the host. A wrapper keeps what the native call
made of them, and the objects it was made from: serving engines replace attributes and ``plan``, so each call compares
them by identity. Tables are read where they were; a tensor whose storage is replaced in place is not noticed. Where
only the plan and its page table are others, a record is given these: a serving loop plans at each step.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import torch

from .. import utils
from ..allocation import allocate, contiguous_strides, cuda_index
from ..dispatch import use_pdl

__all__ = ["CallRecord", "aligned", "is_misaligned", "record_memory", "unchanged"]

_RECORD_BYTES = 2048
_ROW_ALIGNMENT = 16  # bytes


def unchanged(
    objects: Sequence[str], numbers: Sequence[str], but: Sequence[str] = ()
) -> Callable[[Any, Sequence[Any]], bool]:
    """Whether attributes, ``but`` some, are those of a tuple (``state_of``): the same objects, equal numbers. Code made
    once: looking at twenty names takes 0.5 us, and three times that in a loop."""
    tests = [f"self.{name} is state[{i}]" for i, name in enumerate(objects) if name not in but]
    tests += [f"self.{name} == state[{i}]" for i, name in enumerate(numbers, len(objects)) if name not in but]
    return eval(f"lambda self, state: {' and '.join(tests)}")


class CallRecord:
    """What ``rerun`` of a module needs, what outputs are, and what it was made from.

    If q has other rows than before, the native call says so.
    """

    __slots__ = (
        "default_scale",
        "device_index",
        "dtype",
        "least_pages",
        "memory",
        "pdl",
        "pdl_probe",
        "rerun",
        "shape",
        "state",
        "strides",
    )

    def __init__(
        self,
        module: Any,
        memory: Any,
        state: tuple[Any, ...],
        out: torch.Tensor,
        default_scale: float,
        least_pages: int = 0,
    ) -> None:
        self.rerun = module.rerun
        self.memory = memory
        self.state = state
        self.shape = tuple(out.shape)
        self.strides = contiguous_strides(self.shape)
        self.dtype = out.dtype
        self.device_index = cuda_index(out)
        self.default_scale = default_scale
        self.least_pages = least_pages  #: of a cache; if it has fewer, page ids are looked at again, as ``replan`` does
        self.pdl_probe = utils.device_support_pdl  # engines replace it
        self.pdl = use_pdl(out, None)

    def is_too_small(self, cache: Any) -> bool:
        """Whether a cache has fewer pages than the one whose page ids were looked at."""
        try:
            return len(cache) < self.least_pages
        except TypeError:
            return False  # the native call says what it is

    def scores(self) -> torch.Tensor:
        """Room for another LSE."""
        rows, heads = self.shape[:2]
        return allocate((rows, heads), (heads, 1), torch.float32, self.device_index)


def record_memory() -> Any:
    """A tensor that native code writes a record to; of the FFI's type, because it is passed at each call."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(torch.zeros(_RECORD_BYTES, dtype=torch.uint8, device="cpu"))


def is_misaligned(error: Exception) -> bool:
    """Whether a launch was refused because rows do not start at multiples of 16 bytes. Nothing has run then."""
    return "misaligned address" in str(error)


def aligned(x: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """The tensor, or a contiguous copy if its rows do not start at multiples of 16 bytes."""
    if x is None:
        return None
    steps = [x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:-1])]
    if all(step % _ROW_ALIGNMENT == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)
