# SPDX-License-Identifier: Apache-2.0
"""The measuring loops: host clock, CUDA events, CUDA graphs. Each returns milliseconds, one value per iteration."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Optional

import torch

from .cold_cache import (
    CacheFlush,
    Flush,
    calculate_rotation_count,
    copy_inputs,
    distinct_bytes,
    get_l2_cache_size,
    tensors_in,
)

__all__ = [
    "Plan",
    "aggregate_gpu_time_across_ranks",
    "capture",
    "event_times",
    "graph_times",
    "host_times",
    "sleep_after_kernel_run",
]

Call = Callable[[], Any]
_ESTIMATE_RUNS = 5
_FEWEST_REPEATS = 5  # a median of fewer repeats is unreliable, even for slow calls


def sleep_after_kernel_run(execution_time: float) -> None:
    """Sleep as long as the call ran (``execution_time`` in ms, at most a second), so that the chip cools down.

    Examples
    --------
    >>> import time
    >>> begin = time.perf_counter()
    >>> flashinfer.testing.sleep_after_kernel_run(2.0)
    >>> time.perf_counter() - begin >= 0.002
    True
    """
    rest = execution_time if math.isfinite(execution_time) else 1e3
    time.sleep(min(max(rest, 0.0), 1e3) / 1e3)


def aggregate_gpu_time_across_ranks(x: Any, op: Callable[..., float] = max) -> Any:
    """Reduce a time, or a list of times element by element, over the ranks of ``torch.distributed``.

    Without an initialised process group, or with one rank, ``x`` is returned as it is.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return x
    world = torch.distributed.get_world_size()
    if world == 1:
        return x
    ranks: list[Any] = [None] * world
    torch.distributed.all_gather_object(ranks, x)
    return [op(values) for values in zip(*ranks, strict=True)] if isinstance(x, (list, tuple)) else op(ranks)


@dataclass(frozen=True)
class Plan:
    """Options of a measurement: number of runs, state of the cache, and actions between runs."""

    dry_run_iters: Optional[int] = None
    repeat_iters: Optional[int] = None
    dry_run_time_ms: float = 25
    repeat_time_ms: float = 100
    cold: bool = True
    flush_bytes: Optional[int] = None
    flush_device: Any = None
    rest: bool = False
    aggregate: Callable[..., float] = max

    def flush(self, device: Any = None) -> Flush:
        return CacheFlush(self.flush_device or device, self.flush_bytes) if self.cold else None

    def counts(self, estimate: Callable[[], float]) -> tuple[int, int]:
        """(dry, repeat) iterations; ``estimate()`` gives the ms of one run and is asked only if a count is missing."""
        dry, repeat = self.dry_run_iters, self.repeat_iters
        if dry is None or repeat is None:
            # All ranks must agree on the counts, or those that run more wait for ever in a collective.
            one = max(aggregate_gpu_time_across_ranks(estimate(), self.aggregate), 1e-4)
            dry = max(1, math.ceil(self.dry_run_time_ms / one)) if dry is None else dry
            repeat = max(_FEWEST_REPEATS, math.ceil(self.repeat_time_ms / one)) if repeat is None else repeat
        return dry, repeat


def time_on_host(call: Call, flush: Flush) -> float:
    """Return the milliseconds of one synchronous call."""
    if flush:
        flush()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def time_by_events(call: Call, repeat: int, flush: Flush, rest: bool = False) -> list[float]:
    """Return the milliseconds between two CUDA events around each of ``repeat`` calls on the current stream."""
    pairs = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if flush:
            flush()
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
        if rest:
            end.synchronize()
            sleep_after_kernel_run(begin.elapsed_time(end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs]


def host_times(call: Call, plan: Plan) -> list[float]:
    """Wall time of a synchronous call, for CPU tensors."""
    flush = plan.flush("cpu")

    def estimate() -> float:
        # The flush counts here: it can take longer than the call, and the time budget covers the whole measurement.
        start = time.perf_counter()
        for _ in range(_ESTIMATE_RUNS):
            time_on_host(call, flush)
        return (time.perf_counter() - start) * 1e3 / _ESTIMATE_RUNS

    call()
    dry, repeat = plan.counts(estimate)
    for _ in range(dry):
        call()
    times = []
    for _ in range(repeat):
        times.append(time_on_host(call, flush))
        if plan.rest:
            sleep_after_kernel_run(times[-1])
    return aggregate_gpu_time_across_ranks(times, plan.aggregate)


def event_times(call: Call, plan: Plan, flush: Flush) -> list[float]:
    """Time between two CUDA events around each call on the current stream."""
    call()
    torch.cuda.synchronize()
    dry, repeat = plan.counts(lambda: statistics.mean(time_by_events(call, _ESTIMATE_RUNS, flush)))
    for _ in range(dry):
        call()
    return aggregate_gpu_time_across_ranks(time_by_events(call, repeat, flush, plan.rest), plan.aggregate)


def capture(call: Call) -> torch.cuda.CUDAGraph:
    """Record one run of ``call`` as a CUDA graph, after the warm-up on a side stream that capture asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def graph_times(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], plan: Plan, calls: int
) -> list[float]:
    """Replay a graph of ``calls`` calls; each value is a replay's time divided by ``calls``.

    From a cold cache every call in the graph gets its own copy of the inputs. Where all copies together still fit in
    the cache, it is flushed before the replay too. A closure has no inputs to copy: its graph holds one call.
    """
    inputs = [t for t in tensors_in([args, dict(kwargs)]) if t.is_cuda]
    copies, flush = [(args, dict(kwargs))], None
    if plan.cold:
        if not inputs:
            calls = 1
        device = inputs[0].device if inputs else None
        wanted = min(calculate_rotation_count(inputs, device), calls)
        copies += [copy_inputs((args, dict(kwargs))) for _ in range(wanted - 1)]
        if wanted * distinct_bytes(inputs) < 5 * get_l2_cache_size(device):
            flush = plan.flush(device)

    def all_calls() -> None:
        for i in range(calls):
            positional, named = copies[i % len(copies)]
            fn(*positional, **named)

    graph = capture(all_calls)
    return [time_ms / calls for time_ms in event_times(graph.replay, plan, flush)]
