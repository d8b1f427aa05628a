# SPDX-License-Identifier: Apache-2.0
"""Call cache: if plan and options are unchanged since the last ``run()``, skip validation and pass only the tensors.

Validation of a dozen tensors and numbers is most of the host time of a launch. A wrapper therefore keeps a record of
the validated native call, together with the objects from which the record was built. Serving engines replace
attributes and ``plan``, so each call compares these objects by identity. Page tables are read at their recorded
addresses; replacing the storage of a table tensor in place goes unnoticed. If only the plan and its page table changed,
``replan`` updates the record, because a serving loop calls ``plan`` at each step.
"""

from __future__ import annotations

from typing import Any, Optional, Protocol

import torch

from .._runtime.allocation import allocate, contiguous_strides, cuda_index
from .._runtime.dispatch import use_pdl
from .._runtime.errors import ArgumentError
from .._runtime.probes import probes

__all__ = ["CallRecord", "CallState", "aligned", "is_launch_error", "record_memory"]

_RECORD_BYTES = 2048
_ROW_ALIGNMENT = 16  # bytes


class CallState(Protocol):
    """Attributes of a wrapper from which a recorded call was built: objects compare by identity, numbers by value.

    The comparisons of an implementation are written out: a loop over twenty names takes three times as long, 1.5 us
    for each ``run``.
    """

    def has_plan_of(self, wrapper: Any) -> bool:
        """Return True if the wrapper still has the plan and the tables of the recorded call."""

    def has_options_of(self, wrapper: Any) -> bool:
        """Return True if everything else that ``run`` reads, except ``_sm_scale``, is as in the recorded call."""

    def take_plan(self, wrapper: Any) -> None:
        """Replace the plan and the tables, after the module's ``replan`` has updated the record."""


class CallRecord:
    """Record of one native call: the arguments of ``rerun``, the form of the outputs, and the recorded state.

    If q has another number of rows than the recorded call, the native call raises an error.
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
        state: CallState,
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
        self.least_pages = least_pages  #: pages; a smaller cache needs its page ids validated again by ``replan``
        self.pdl_probe = probes.device_support_pdl  # serving engines patch this function
        self.pdl = use_pdl(out, None)

    def is_too_small(self, cache: Any) -> bool:
        """Return True if a cache has fewer pages than the cache against which the page ids were validated."""
        try:
            return len(cache) < self.least_pages
        except TypeError:
            return False  # not a sized object: the native call raises the error

    def scores(self) -> torch.Tensor:
        """Allocate an LSE buffer for the next call."""
        rows, heads = self.shape[:2]
        return allocate((rows, heads), (heads, 1), torch.float32, self.device_index)


def record_memory() -> Any:
    """Allocate the tensor in which native code keeps a record, as an FFI tensor because each call passes it."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(torch.zeros(_RECORD_BYTES, dtype=torch.uint8, device="cpu"))


def is_launch_error(error: Exception) -> bool:
    """Return True for errors of a launch, among them rows that are not aligned; False for rejected arguments."""
    return isinstance(error, RuntimeError) and not isinstance(error, ArgumentError)


def aligned(x: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """Return the tensor, or a contiguous copy if its rows are not aligned to 16 bytes."""
    if x is None or x.layout is not torch.strided:
        return x
    steps = [x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:-1])]
    if all(step % _ROW_ALIGNMENT == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)
