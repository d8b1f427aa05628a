# SPDX-License-Identifier: Apache-2.0
"""Kernel times from torch's own profiler, for picking single kernels out of a call."""

from __future__ import annotations

import os
import sys
from typing import Any, Callable, Optional, Sequence, Union

import torch

from .._runtime.errors import ArgumentError
from .cold_cache import CacheFlush

__all__ = ["bench_kineto", "empty_suppress", "suppress_stdout_stderr"]


class empty_suppress:
    """Context manager that does nothing; the other choice beside :class:`suppress_stdout_stderr`."""

    def __enter__(self) -> empty_suppress:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None


class suppress_stdout_stderr:
    """Send both output streams to ``/dev/null``: Python's, and those that C libraries write to."""

    def __enter__(self) -> suppress_stdout_stderr:
        sys.stdout.flush()
        sys.stderr.flush()
        self._null = open(os.devnull, "w")
        self._descriptors = [os.dup(1), os.dup(2)]
        self._streams = sys.stdout, sys.stderr
        for target in (1, 2):
            os.dup2(self._null.fileno(), target)
        sys.stdout = sys.stderr = self._null
        return self

    def __exit__(self, *exc: Any) -> None:
        sys.stdout, sys.stderr = self._streams
        for target, saved in zip((1, 2), self._descriptors, strict=True):
            os.dup2(saved, target)
            os.close(saved)
        self._null.close()


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: Union[str, Sequence[str]],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: Optional[str] = None,
    flush_l2: bool = True,
    with_multiple_kernels: bool = False,
) -> Union[float, tuple[float, ...]]:
    """Mean seconds per call of ``fn`` spent in the kernels whose name contains ``kernel_names``.

    Parameters
    ----------
    fn : callable
        Called without arguments.
    kernel_names : str or sequence of str
        A sequence gives a tuple of times. Without a GPU these are names of CPU operators, such as ``aten::mm``.
    num_tests : int
        Number of profiled calls.
    suppress_kineto_output : bool
        Silence the output streams while the profiler runs.
    trace_path : str, optional
        Also write a Chrome trace there.
    flush_l2 : bool
        Overwrite the cache before each call.
    with_multiple_kernels : bool
        Allow a name to match several kernels and add them up; otherwise exactly one must match.
    """
    on_gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    flush = CacheFlush() if flush_l2 else None
    fn()
    with suppress_stdout_stderr() if suppress_kineto_output else empty_suppress():
        with torch.profiler.profile(activities=[activity]) as profile:
            for _ in range(num_tests):
                if flush:
                    flush()
                fn()
            if on_gpu:
                torch.cuda.synchronize()
        if trace_path is not None:
            profile.export_chrome_trace(str(trace_path))

    averages = profile.key_averages()
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
    times = []
    for name in names:
        found = [event for event in averages if name in event.key]
        if not found or (len(found) > 1 and not with_multiple_kernels):
            raise ArgumentError(
                f"bench_kineto: kernel_names must match one kernel, got {name!r}, which matches "
                f"{[event.key for event in found]}; profiled were {sorted(event.key for event in averages)}"
            )
        total_us = sum(event.self_device_time_total if on_gpu else event.self_cpu_time_total for event in found)
        times.append(total_us / num_tests / 1e6)
    return times[0] if isinstance(kernel_names, str) else tuple(times)
