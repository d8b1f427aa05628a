# SPDX-License-Identifier: Apache-2.0
"""``bench_gpu_time``: how long a function takes on the device its tensors live on.

Two calling conventions exist in published code, and the keywords tell them apart:

* ``args`` / ``kwargs`` / ``num_iters``: returns ``(median, std)`` in **seconds**;
* ``input_args`` / ``input_kwargs``, or none of these: returns the list of all iterations in **milliseconds**.
"""

from __future__ import annotations

import statistics
import warnings
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Union

import torch

from .._runtime.errors import ArgumentError
from .cold_cache import tensors_in
from .cupti import cupti_problem, cupti_times
from .timers import Plan, capture, event_times, graph_times, host_times

__all__ = [
    "BenchTime",
    "bench_cpu_time",
    "bench_gpu_time",
    "bench_gpu_time_with_cuda_event",
    "bench_gpu_time_with_cudagraph",
    "bench_gpu_time_with_cupti",
    "summarize",
]

Function = Callable[..., Any]
Kwargs = Optional[Mapping[str, Any]]


class BenchTime(NamedTuple):
    """Median and standard deviation, in seconds."""

    median: float
    std: float


def summarize(times_ms: Sequence[float]) -> BenchTime:
    """Return median and (population) standard deviation in seconds of a list in milliseconds.

    Examples
    --------
    >>> flashinfer.testing.summarize([1.0, 2.0, 6.0]).median  # seconds
    0.002
    """
    return BenchTime(statistics.median(times_ms) / 1e3, statistics.pstdev(times_ms) / 1e3)


def _plan(
    dry_run_iters: Optional[int],
    repeat_iters: Optional[int],
    dry_run_time_ms: float,
    repeat_time_ms: float,
    l2_flush: Optional[bool],
    l2_flush_size_mb: Optional[int],
    l2_flush_device: Any,
    sleep_after_run: bool,
    cold_l2_cache: bool,
    aggregate_op: Callable[..., float],
) -> Plan:
    """Return the measuring plan; ``l2_flush*`` are the deprecated spelling of ``cold_l2_cache``."""
    if l2_flush is not None or l2_flush_size_mb is not None or l2_flush_device is not None:
        warnings.warn("bench_gpu_time: l2_flush* is deprecated, use cold_l2_cache", DeprecationWarning, stacklevel=3)
    for name, count, least in (("dry_run_iters", dry_run_iters, 0), ("repeat_iters", repeat_iters, 1)):
        if count is not None and count < least:
            raise ArgumentError(f"bench_gpu_time: {name} must be at least {least}, got {count}")
    return Plan(
        dry_run_iters=dry_run_iters,
        repeat_iters=repeat_iters,
        dry_run_time_ms=dry_run_time_ms,
        repeat_time_ms=repeat_time_ms,
        cold=cold_l2_cache if l2_flush is None else l2_flush,
        flush_bytes=l2_flush_size_mb << 20 if l2_flush_size_mb else None,
        flush_device=l2_flush_device,
        rest=sleep_after_run,
        aggregate=aggregate_op,
    )


def _require_cuda(name: str) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(f"{name} needs a CUDA device; bench_gpu_time and bench_cpu_time time CPU functions")


def _bind(fn: Function, args: Sequence[Any], kwargs: Kwargs) -> Callable[[], Any]:
    named = dict(kwargs or {})
    return lambda: fn(*args, **named)


def bench_cpu_time(
    fn: Function,
    dry_run_iters: Optional[int] = None,
    repeat_iters: Optional[int] = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    input_args: Sequence[Any] = (),
    input_kwargs: Kwargs = None,
    cold_cache: bool = True,
) -> list[float]:
    """Milliseconds of each iteration by the host clock, the last-level cache overwritten before every one.

    Examples
    --------
    >>> times_ms = flashinfer.testing.bench_cpu_time(torch.neg, 1, 3, input_args=(torch.ones(8),), cold_cache=False)
    >>> len(times_ms)
    3
    """
    plan = _plan(dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms, None, None, None, False, cold_cache, max)
    return host_times(_bind(fn, input_args, input_kwargs), plan)


def bench_gpu_time_with_cuda_event(
    fn: Function,
    dry_run_iters: Optional[int] = None,
    repeat_iters: Optional[int] = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    l2_flush: Optional[bool] = None,
    l2_flush_size_mb: Optional[int] = None,
    l2_flush_device: Any = None,
    sleep_after_run: bool = False,
    input_args: Sequence[Any] = (),
    input_kwargs: Kwargs = None,
    cold_l2_cache: bool = True,
    aggregate_op: Callable[..., float] = max,
) -> list[float]:
    """Milliseconds of each iteration between CUDA events. Parameters as in :func:`bench_gpu_time`."""
    _require_cuda("bench_gpu_time_with_cuda_event")
    plan = _plan(
        dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms, l2_flush, l2_flush_size_mb, l2_flush_device,
        sleep_after_run, cold_l2_cache, aggregate_op,
    )  # fmt: skip
    return event_times(_bind(fn, input_args, input_kwargs), plan, plan.flush())


def bench_gpu_time_with_cudagraph(
    fn: Function,
    dry_run_iters: Optional[int] = None,
    repeat_iters: Optional[int] = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    num_iters_within_graph: int = 10,
    l2_flush: Optional[bool] = None,
    l2_flush_size_mb: Optional[int] = None,
    l2_flush_device: Any = None,
    sleep_after_run: bool = False,
    input_args: Sequence[Any] = (),
    input_kwargs: Kwargs = None,
    cold_l2_cache: bool = True,
    aggregate_op: Callable[..., float] = max,
) -> list[float]:
    """Milliseconds per call inside a replayed CUDA graph, inputs rotated. Parameters as in :func:`bench_gpu_time`."""
    _require_cuda("bench_gpu_time_with_cudagraph")
    plan = _plan(
        dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms, l2_flush, l2_flush_size_mb, l2_flush_device,
        sleep_after_run, cold_l2_cache, aggregate_op,
    )  # fmt: skip
    return graph_times(fn, tuple(input_args), input_kwargs or {}, plan, num_iters_within_graph)


def bench_gpu_time_with_cupti(
    fn: Function,
    dry_run_iters: Optional[int] = None,
    repeat_iters: Optional[int] = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    l2_flush: Optional[bool] = None,
    l2_flush_size_mb: Optional[int] = None,
    l2_flush_device: Any = None,
    sleep_after_run: bool = False,
    use_cuda_graph: bool = False,
    input_args: Sequence[Any] = (),
    input_kwargs: Kwargs = None,
    cold_l2_cache: bool = True,
    aggregate_op: Callable[..., float] = max,
) -> list[float]:
    """Milliseconds from the first to the last GPU activity of each call, as CUPTI records them.

    Without a usable cupti-python, warns and measures with a CUDA graph (``use_cuda_graph``) or with CUDA events.
    """
    _require_cuda("bench_gpu_time_with_cupti")
    plan = _plan(
        dry_run_iters, repeat_iters, dry_run_time_ms, repeat_time_ms, l2_flush, l2_flush_size_mb, l2_flush_device,
        sleep_after_run, cold_l2_cache, aggregate_op,
    )  # fmt: skip
    call = _bind(fn, input_args, input_kwargs)
    problem = cupti_problem()
    if problem is None:
        return cupti_times(capture(call).replay if use_cuda_graph else call, plan, plan.flush())
    instead = "a CUDA graph" if use_cuda_graph else "CUDA events"
    warnings.warn(f"bench_gpu_time: {problem}; timing with {instead} instead", stacklevel=2)
    if use_cuda_graph:
        return graph_times(fn, tuple(input_args), input_kwargs or {}, plan, 10)
    return event_times(call, plan, plan.flush())


def _runs_on_cpu(args: Sequence[Any], kwargs: Kwargs) -> bool:
    if not torch.cuda.is_available():
        return True
    devices = {t.device.type for t in tensors_in([list(args), dict(kwargs or {})])}
    return bool(devices) and "cuda" not in devices


def bench_gpu_time(
    fn: Function,
    dry_run_iters: Optional[int] = None,
    repeat_iters: Optional[int] = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    l2_flush: Optional[bool] = None,
    l2_flush_size_mb: Optional[int] = None,
    l2_flush_device: Any = None,
    sleep_after_run: bool = False,
    enable_cupti: bool = False,
    use_cuda_graph: bool = False,
    num_iters_within_graph: int = 10,
    input_args: Sequence[Any] = (),
    input_kwargs: Kwargs = None,
    cold_l2_cache: bool = True,
    aggregate_op: Callable[..., float] = max,
    *,
    args: Optional[Sequence[Any]] = None,
    kwargs: Kwargs = None,
    num_iters: Optional[int] = None,
) -> Union[list[float], BenchTime]:
    """Time ``fn`` on the GPU, or on the CPU when it has CPU tensors or there is no GPU.

    Parameters
    ----------
    fn : callable
        What to time; called as ``fn(*args, **kwargs)``.
    dry_run_iters, repeat_iters : int, optional
        Untimed and timed iterations. Default: as many as fill ``dry_run_time_ms`` and ``repeat_time_ms``, by an
        estimate from five runs.
    l2_flush, l2_flush_size_mb, l2_flush_device
        Deprecated spelling of ``cold_l2_cache``.
    sleep_after_run : bool
        Rest after each iteration for as long as it took.
    enable_cupti : bool
        Take kernel times from CUPTI; warns and falls back to a graph or events without cupti-python 13 or later.
    use_cuda_graph : bool
        Time replays of a CUDA graph with ``num_iters_within_graph`` calls, which hides launch gaps.
    input_args, input_kwargs
        Arguments of ``fn``. With ``cold_l2_cache`` a graph rotates copies of the CUDA tensors among them.
    cold_l2_cache : bool
        Start every call with none of its data in the cache.
    aggregate_op : callable
        Reduces the values of one iteration over the ranks of ``torch.distributed``.
    args, kwargs, num_iters
        The other spelling of ``input_args``, ``input_kwargs`` and ``repeat_iters``; any of them selects the
        ``(median, std)`` result.

    Returns
    -------
    list of float, or BenchTime
        Milliseconds of every iteration; or ``(median, std)`` in seconds if ``args``, ``kwargs`` or ``num_iters`` is
        given.

    Examples
    --------
    >>> from flashinfer.testing import bench_gpu_time
    >>> median, std = bench_gpu_time(torch.neg, args=(torch.ones(8),), num_iters=10)
    >>> times_ms = bench_gpu_time(torch.neg, input_args=(torch.ones(8),), repeat_iters=10)
    """
    pair = args is not None or kwargs is not None or num_iters is not None
    for one, other, both in (
        ("args", "input_args", args is not None and len(input_args) > 0),
        ("kwargs", "input_kwargs", kwargs is not None and input_kwargs is not None),
        ("num_iters", "repeat_iters", num_iters is not None and repeat_iters is not None),
    ):
        if both:
            raise ArgumentError(
                f"bench_gpu_time: only one of {one} and {other} must be given (they mean the same), got both"
            )
    inputs = args if args is not None else input_args
    if isinstance(inputs, torch.Tensor):  # a tensor would be unpacked into its rows
        raise ArgumentError("bench_gpu_time: args must be a tuple of arguments, such as (x,), got a tensor")
    named = kwargs if kwargs is not None else input_kwargs
    repeats = num_iters if num_iters is not None else repeat_iters

    common: dict[str, Any] = {
        "dry_run_iters": dry_run_iters,
        "repeat_iters": repeats,
        "dry_run_time_ms": dry_run_time_ms,
        "repeat_time_ms": repeat_time_ms,
        "l2_flush": l2_flush,
        "l2_flush_size_mb": l2_flush_size_mb,
        "l2_flush_device": l2_flush_device,
        "sleep_after_run": sleep_after_run,
        "cold_l2_cache": cold_l2_cache,
        "aggregate_op": aggregate_op,
    }
    if _runs_on_cpu(inputs, named):
        if enable_cupti or use_cuda_graph:
            warnings.warn("bench_gpu_time: no GPU work to time; using the host clock", stacklevel=2)
        times = host_times(_bind(fn, inputs, named), _plan(**common))
    else:
        common.update(input_args=inputs, input_kwargs=named)
        if enable_cupti:
            times = bench_gpu_time_with_cupti(fn, use_cuda_graph=use_cuda_graph, **common)
        elif use_cuda_graph:
            times = bench_gpu_time_with_cudagraph(fn, num_iters_within_graph=num_iters_within_graph, **common)
        else:
            times = bench_gpu_time_with_cuda_event(fn, **common)
    return summarize(times) if pair else times
