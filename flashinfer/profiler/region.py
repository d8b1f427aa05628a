# SPDX-License-Identifier: Apache-2.0
"""``profile_kernel``: NVTX range and elapsed time of a labelled block."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Iterator, Optional

import torch

__all__ = ["KernelProfile", "profile_kernel"]

#: Lists that each region is appended to when it ends; profile_session adds and removes its own.
collectors: list[list[KernelProfile]] = []

_open = threading.local()  # .depth: number of open regions of this thread


class KernelProfile:
    """Result of :func:`profile_kernel`, complete once its block has ended.

    Attributes
    ----------
    label : str
        The label of the block.
    device : str
        ``"cuda"`` when the time is between two CUDA events, ``"cpu"`` when it is wall time.
    began : float
        Time of ``time.perf_counter`` when the block began.
    thread, depth : int
        Identifier of the thread that ran the block, and the number of regions of that thread around it.
    """

    def __init__(self, label: str, events: Optional[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        self.label = label
        self.device = "cpu" if events is None else "cuda"
        self.began = 0.0
        self.thread = threading.get_ident()
        self.depth = 0
        self._events = events
        self._ended = False
        self._elapsed_ms: Optional[float] = None

    def _begin(self) -> None:
        if self._events:
            self._events[0].record()
        self.depth = getattr(_open, "depth", 0)
        _open.depth = self.depth + 1
        self.began = time.perf_counter()

    def _end(self) -> None:
        if self._events:
            self._events[1].record()  # the time is known once the GPU gets here
        else:
            self._elapsed_ms = (time.perf_counter() - self.began) * 1e3
        _open.depth = self.depth
        self._ended = True
        for collector in collectors:
            collector.append(self)

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds; waits for the GPU on first use."""
        if not self._ended:
            raise RuntimeError(
                f"profile_kernel: {self.label!r} must be read after its block, got a block that has not ended"
            )
        if self._elapsed_ms is None:
            assert self._events is not None
            begin, end = self._events
            end.synchronize()
            self._elapsed_ms = begin.elapsed_time(end)
        return self._elapsed_ms

    def elapsed_since(self, event: torch.cuda.Event) -> float:
        """Milliseconds from ``event`` to the start of a region on the GPU; waits for the GPU."""
        assert self._events is not None
        self._events[1].synchronize()
        return event.elapsed_time(self._events[0])

    @property
    def elapsed_s(self) -> float:
        """Seconds."""
        return self.elapsed_ms / 1e3

    def __str__(self) -> str:
        return f"[profile] {self.label}: {self.elapsed_ms:.3f} ms ({self.device})"

    def __repr__(self) -> str:
        return f"KernelProfile(label={self.label!r}, device={self.device!r})"


@contextlib.contextmanager
def profile_kernel(label: str, verbose: bool = True) -> Iterator[KernelProfile]:
    """Time the work of a block and mark it for Nsight.

    With a GPU the block becomes an NVTX range, and its time is that between two CUDA events on the current stream;
    inside a graph capture, where events cannot be read, only the range is made and the time is wall time. Without a
    GPU the time is wall time.

    Parameters
    ----------
    label : str
        Name of the range and of the result.
    verbose : bool
        Print a line when the block ends, which waits for the GPU. False prints nothing and does not wait.

    Yields
    ------
    KernelProfile
        Read ``elapsed_ms`` after the block. :func:`profile_session` collects many of them.

    Examples
    --------
    >>> from flashinfer.profiler import profile_kernel
    >>> with profile_kernel("square", verbose=False) as profile:
    ...     y = torch.ones(8).square()
    >>> profile.elapsed_ms > 0
    True
    """
    has_gpu = torch.cuda.is_available()
    events = None
    if has_gpu and not torch.cuda.is_current_stream_capturing():
        events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
    profile = KernelProfile(label, events)
    if has_gpu:
        torch.cuda.nvtx.range_push(label)  # nvtx.range() would take braces in the label for a format
    profile._begin()
    try:
        yield profile
    finally:
        profile._end()
        if has_gpu:
            torch.cuda.nvtx.range_pop()
    if verbose:
        print(profile)
