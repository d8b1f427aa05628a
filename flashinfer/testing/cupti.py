# SPDX-License-Identifier: Apache-2.0
"""Kernel times from CUPTI activity records: no launch gaps, no event overhead. Needs cupti-python 13 or later."""

from __future__ import annotations

import importlib.metadata
import statistics
import threading
from typing import Any, Callable, NamedTuple, Optional

import torch

from .cold_cache import Flush
from .timers import Plan, aggregate_gpu_time_across_ranks, sleep_after_kernel_run

__all__ = ["cupti_problem", "cupti_times"]

_OLDEST = 13  # earlier releases of the binding target CUDA 12 drivers
_BUFFER_BYTES = 8 << 20


class Activity(NamedTuple):
    """One kernel, copy or fill that ran on the GPU; times in nanoseconds of CUPTI's clock."""

    name: str
    start: int
    end: int


def cupti_problem() -> Optional[str]:
    """Return the reason why CUPTI cannot be used here, or ``None`` if it can."""
    try:
        version = importlib.metadata.version("cupti-python")
    except importlib.metadata.PackageNotFoundError:
        return "cupti-python is not installed"
    if int(version.split(".")[0]) < _OLDEST:
        return f"cupti-python must be {_OLDEST} or later, got {version}"
    try:
        from cupti import cupti  # noqa: F401
    except (ImportError, OSError) as error:
        return f"cupti-python {version} does not load ({error})"
    return None


class _Collector:
    """Gathers activities between ``start`` and ``stop``. CUPTI calls back on a thread of its own."""

    def __init__(self) -> None:
        from cupti import cupti

        self._cupti = cupti
        kinds = cupti.ActivityKind
        self._kinds = (kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET)
        self._lock = threading.Lock()
        self._activities: list[Activity] = []

    def now(self) -> int:
        return self._cupti.get_timestamp()

    def _completed(self, records: list[Any]) -> None:
        # Records live in a buffer that is reused after this call, so the fields are copied out.
        found = [
            Activity(str(getattr(r, "name", None) or r.kind), r.start, r.end) for r in records if r.kind in self._kinds
        ]
        with self._lock:
            self._activities.extend(found)

    def start(self) -> None:
        self._cupti.activity_register_callbacks(lambda: (_BUFFER_BYTES, 0), self._completed)
        for kind in self._kinds:
            self._cupti.activity_enable(kind)

    def stop(self) -> list[Activity]:
        torch.cuda.synchronize()
        self._cupti.activity_flush_all(1)
        for kind in self._kinds:
            self._cupti.activity_disable(kind)
        with self._lock:
            found, self._activities = self._activities, []
        return sorted(found, key=lambda a: a.start)


def _spans(activities: list[Activity], windows: list[tuple[int, int]]) -> list[float]:
    """Milliseconds from the first start to the last end inside each host-side window."""
    times, expected = [], None
    for begin, end in windows:
        inside = [a for a in activities if begin <= a.start <= end]
        names = sorted(a.name for a in inside)
        if not inside:
            raise RuntimeError("bench_gpu_time: a call must launch at least one kernel, got no GPU activity from CUPTI")
        if expected is not None and names != expected:
            raise RuntimeError(
                f"bench_gpu_time: the call must run {expected} as in its first iteration (times of different work must "
                f"not be mixed), got {names}"
            )
        expected = names
        times.append((max(a.end for a in inside) - inside[0].start) / 1e6)
    return times


def cupti_times(call: Callable[[], Any], plan: Plan, flush: Flush) -> list[float]:
    """Span of GPU activity of each call."""
    collector = _Collector()

    def timed(repeat: int, rest: bool = False) -> list[float]:
        windows = []
        collector.start()
        try:
            for _ in range(repeat):
                if flush:
                    flush()
                # The device is idle at both ends of a window, so activity that starts inside it belongs to the call.
                torch.cuda.synchronize()
                begin = collector.now()
                call()
                torch.cuda.synchronize()
                windows.append((begin, collector.now()))
                if rest:
                    sleep_after_kernel_run((windows[-1][1] - begin) / 1e6)
        finally:
            activities = collector.stop()
        return _spans(activities, windows)

    call()
    dry, repeat = plan.counts(lambda: statistics.mean(timed(5)))
    for _ in range(dry):
        call()
    return aggregate_gpu_time_across_ranks(timed(repeat, plan.rest), plan.aggregate)
