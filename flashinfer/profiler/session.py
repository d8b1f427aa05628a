# SPDX-License-Identifier: Apache-2.0
"""``profile_session``: collects the regions of a run and reports them as a table, a Chrome trace and a picture."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Optional, Union

import torch
from tabulate import tabulate

from .region import KernelProfile, collectors

__all__ = ["ProfileSession", "Span", "profile_session"]

_COLOURS = ("#3478c8", "#e67e22", "#2e9e5b", "#a04fb5", "#c8393e", "#7f7f7f")


class Span(NamedTuple):
    """One region on the time axis of its session, in milliseconds."""

    label: str
    row: str  #: ``cuda`` for times of the GPU, ``thread N`` for wall times; N counts threads from 0
    start_ms: float
    elapsed_ms: float
    depth: int  #: number of regions of the same thread around this one


class ProfileSession:
    """Regions that ended while the session was open, in the order in which they ended. See :func:`profile_session`."""

    def __init__(self) -> None:
        self.profiles: list[KernelProfile] = []
        self._start = time.perf_counter()
        self._end: Optional[float] = None
        self._event: Optional[torch.cuda.Event] = None
        if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    @property
    def elapsed_ms(self) -> float:
        """Wall time of the session so far, or until it ended."""
        return ((time.perf_counter() if self._end is None else self._end) - self._start) * 1e3

    def spans(self) -> list[Span]:
        """Return the regions, sorted by row and start. Waits for the GPU where a region ran there."""
        threads: dict[int, int] = {}
        found = []
        for profile in self.profiles:
            number = threads.setdefault(profile.thread, len(threads))
            row, start = f"thread {number}", (profile.began - self._start) * 1e3
            if profile.device == "cuda" and self._event is not None:
                row, start = "cuda", profile.elapsed_since(self._event)
            found.append(Span(profile.label, row, start, profile.elapsed_ms, profile.depth))
        return sorted(found, key=lambda span: (span.row, span.start_ms, span.depth))

    def table(self) -> str:
        """Return a row per label, largest total first: calls, total, mean, median and largest time, share of the whole.

        The total of a region includes the regions inside it.
        """
        times: dict[str, list[float]] = {}
        for profile in self.profiles:
            times.setdefault(profile.label, []).append(profile.elapsed_ms)
        whole = self.elapsed_ms
        rows = [
            [label, len(ms), sum(ms), statistics.mean(ms), statistics.median(ms), max(ms), f"{sum(ms) / whole:.1%}"]
            for label, ms in sorted(times.items(), key=lambda item: -sum(item[1]))
        ]
        headers = ["label", "calls", "total ms", "mean ms", "median ms", "max ms", "of session"]
        return tabulate(rows, headers, floatfmt=".3f", colalign=("left", *["right"] * 6))

    def export_chrome_trace(self, path: Union[str, Path]) -> None:
        """Write the regions as JSON that chrome://tracing and https://ui.perfetto.dev open."""
        spans, process = self.spans(), os.getpid()
        rows = {row: i for i, row in enumerate(sorted({span.row for span in spans}))}
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": process, "tid": number, "args": {"name": row}}
            for row, number in rows.items()
        ]
        events += [
            {
                "name": span.label,
                "ph": "X",
                "ts": span.start_ms * 1e3,  # the format counts in microseconds
                "dur": span.elapsed_ms * 1e3,
                "pid": process,
                "tid": rows[span.row],
            }
            for span in spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def export_png(self, path: Union[str, Path]) -> None:
        """Draw the regions as a PNG: time to the right, a row per thread and depth, a colour per label."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise ImportError("export_png: cannot import matplotlib: `pip install flashinfer-python[plot]`") from error

        spans = self.spans()
        rows = sorted({(span.row, span.depth) for span in spans})
        labels = list(dict.fromkeys(span.label for span in spans))
        colours = {label: _COLOURS[i % len(_COLOURS)] for i, label in enumerate(labels)}
        figure = Figure(figsize=(11, 1.6 + 0.4 * max(len(rows), len(labels) / 2)), layout="constrained")
        FigureCanvasAgg(figure)  # no pyplot: it would change the backend of the caller's own pictures
        axes = figure.add_subplot()
        for span in spans:
            place = (rows.index((span.row, span.depth)) - 0.4, 0.8)
            axes.broken_barh([(span.start_ms, span.elapsed_ms)], place, color=colours[span.label], edgecolor="white")
        axes.set(xlabel="milliseconds since the session began", yticks=range(len(rows)))
        axes.set_yticklabels([f"{row}, depth {depth}" if depth else row for row, depth in rows])
        axes.invert_yaxis()
        if labels:
            axes.legend(
                handles=[Patch(color=colour, label=label) for label, colour in colours.items()],
                loc="center left",
                bbox_to_anchor=(1.0, 0.5),
            )
        figure.savefig(path, dpi=110, format="png")


@contextlib.contextmanager
def profile_session() -> Iterator[ProfileSession]:
    """Collect every :func:`profile_kernel` region that ends inside the block, of all threads.

    Yields
    ------
    ProfileSession
        ``table()``, ``export_chrome_trace(path)`` and ``export_png(path)`` report what was collected.

    Examples
    --------
    >>> from flashinfer.profiler import profile_kernel, profile_session
    >>> with profile_session() as session:
    ...     for _ in range(3):
    ...         with profile_kernel("square", verbose=False):
    ...             y = torch.ones(8).square()
    >>> session.table().split()[-7:-5]
    ['square', '3']
    """
    session = ProfileSession()
    collectors.append(session.profiles)
    try:
        yield session
    finally:
        session._end = time.perf_counter()
        for i, profiles in enumerate(collectors):  # compare by identity: nested sessions may hold equal lists
            if profiles is session.profiles:
                del collectors[i]
                break
