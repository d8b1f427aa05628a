# SPDX-License-Identifier: Apache-2.0
"""Time of a served step by what spends it: kernels by their group, gaps between them, and phases of the host.

Kernels and gaps are read from torch's profiler; the host is timed in other steps without it, because the profiler
slows the host down. On a machine without a GPU there are no kernels to separate, so that only the host is shown.
"""

from __future__ import annotations

import functools
import re
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Sequence
from unittest.mock import patch

import torch
from serve.engine import Batch, DecodeGraph, Engine, Launched

#: Groups by the first pattern that a kernel's name has.
GROUPS = tuple(
    (group, re.compile("|".join(parts.split())))
    for group, parts in (
        ("sampling", "flashinfer::sampling TopK MinPKernel UnfilteredKernel DrawKernel argmax ArgMax"),
        (
            "attention",
            "DecodeKernel PrefillKernel PrefillSm90 FusedKernel MergeState MergeKernel MixedSm90 flash_ fmha",
        ),
        (
            "recurrent layers",
            "StepKernel StepOneKernel ScanChunks PrepareChunks StartStates NormalizeRows depthwise conv1d",
        ),
        ("experts, not their products", "flashinfer::moe Moe PermuteKernel FinalizeKernel SortAndPermute MonoKernel"),
        ("products", "[Gg]emm GEMM gemv cutlass nvjet cublas splitK Quantize1x128 xmma"),
        ("norms, RoPE, pages, activation", "Norm Rope AppendKernel AppendManyKernel ActAndMul"),
        ("copies", "Memcpy Memset copy_kernel"),
    )
)
OTHERS = "elementwise and others"
NOTABLE_US = 5.0  #: shorter gaps are those between two launches

Span = tuple[float, float, str]  #: start and end in microseconds, name of the kernel


@dataclass(frozen=True)
class Breakdown:
    """Microseconds of a step."""

    span: float  #: first kernel's start to the last one's end
    kernels: int
    groups: dict[str, float]
    names: dict[str, float]  #: time of each kernel
    gaps: float  #: time without a kernel
    notable_gaps: float  #: the part of it in gaps of more than ``NOTABLE_US``
    longest_gap: float


def group_of(name: str) -> str:
    return next((group for group, pattern in GROUPS if pattern.search(name)), OTHERS)


def short(name: str) -> str:
    """Return a kernel's name without its parameters."""
    return name.replace("void ", "").split("<")[0].split("(")[0]


def break_down(spans: Sequence[Span], steps: int) -> Breakdown:
    """Sum up the kernels of ``steps`` steps. Kernels that overlap, by PDL or on other streams, leave no gap."""
    groups: Counter[str] = Counter()
    names: Counter[str] = Counter()
    gaps, done = [], min(start for start, _, _ in spans)
    begin = done
    for start, end, name in sorted(spans):
        own = max(end - max(start, done), 0.0)  # the first of two kernels at once has the time
        groups[group_of(name)] += own
        names[short(name)] += own
        if start > done:
            gaps.append(start - done)
        done = max(done, end)
    return Breakdown(
        span=(done - begin) / steps,
        kernels=len(spans) // steps,
        groups={name: spent / steps for name, spent in groups.most_common()},
        names={name: spent / steps for name, spent in names.most_common()},
        gaps=sum(gaps) / steps,
        notable_gaps=sum(gap for gap in gaps if gap > NOTABLE_US) / steps,
        longest_gap=max(gaps, default=0.0),
    )


def kernel_spans(step: Callable[[], Any]) -> list[Span]:
    """Run ``step`` under torch's profiler and return its kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = (event for event in profiler.events() if event.device_type.name == "CUDA")
    return [(event.time_range.start, event.time_range.end, event.name) for event in events]


#: Phases of the host by the methods that they are.
PHASES: tuple[tuple[str, Any, str], ...] = (
    ("lists and page tables", Batch, "of"),
    ("plan", Engine, "plan_decode"),
    ("copies and launch of a graph", DecodeGraph, "replay"),
    ("launches one by one", Engine, "run"),
    ("wait for tokens", Launched, "read"),
)


@contextmanager
def host_clock() -> Iterator[Counter[str]]:
    """Time the host's phases in a block of code: seconds by phase. A phase within another counts for itself only."""
    spent: Counter[str] = Counter()
    running: list[float] = []  # time of inner phases

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            running.append(0.0)
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                whole = time.perf_counter() - start
                spent[name] += whole - running.pop()
                if running:
                    running[-1] += whole

        return call

    with ExitStack() as stack:
        for name, owner, method in PHASES:
            function = timed(name, getattr(owner, method))
            is_static = isinstance(owner.__dict__[method], staticmethod)
            stack.enter_context(patch.object(owner, method, staticmethod(function) if is_static else function))
        yield spent


def host_phases(step: Callable[[], Any], steps: int) -> dict[str, float]:
    """Return the host's microseconds of a step by phase; what is in none of them is "engine"."""
    start = time.perf_counter()
    with host_clock() as spent:
        step()
    whole = time.perf_counter() - start
    phases = {name: 1e6 * spent[name] / steps for name, _, _ in PHASES if name in spent}
    return {**phases, "engine": 1e6 * (whole - sum(spent.values())) / steps}


def bar(share: float, width: int = 40) -> str:
    return "#" * round(width * max(min(share, 1.0), 0.0))


def lines_of(parts: dict[str, float], whole: float, width: int = 30) -> list[str]:
    return [
        f"  {name:{width}s} {us:10.1f} us {100 * us / whole:5.1f} %  {bar(us / whole)}" for name, us in parts.items()
    ]


def print_profile(step: Callable[[], Any], steps: int, is_cuda: bool) -> dict[str, Any]:
    """Print and return where the time of a step goes; ``step`` runs ``steps`` steps each time."""
    host = host_phases(step, steps)
    result: dict[str, Any] = {"host_us": {name: round(us, 1) for name, us in host.items()}}
    print("  host, without the profiler:")
    print("\n".join(lines_of(host, sum(host.values()))))
    spans = kernel_spans(step) if is_cuda else []
    if not spans:
        print(
            "  no kernels: the device is the CPU, whose work is part of the phases" if not is_cuda else "  no kernels"
        )
        return result
    found = break_down(spans, steps)
    print(f"  device, with the profiler: {found.kernels} kernels in {found.span:.1f} us a step")
    print("\n".join(lines_of({**found.groups, "gaps": found.gaps}, found.span)))
    print(f"  gaps above {NOTABLE_US:g} us: {found.notable_gaps:.1f} us a step, the longest {found.longest_gap:.1f}")
    for name, us in list(found.names.items())[:16]:
        print(f"    {us:9.1f} us  {name[:100]}")
    groups = {name: round(us, 1) for name, us in found.groups.items()}
    facts = {"kernels": found.kernels, "gaps_us": round(found.gaps, 1), "longest_gap_us": round(found.longest_gap, 1)}
    return {**result, "device_us": groups, **facts}
