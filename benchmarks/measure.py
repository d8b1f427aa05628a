# SPDX-License-Identifier: Apache-2.0
"""Measure one Bench: time from a cold cache, fraction of the device's measured peak, ratio to torch, correctness."""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import dataclass
from typing import Any, Mapping, Optional

import torch
from case import Bench, Run

from flashinfer.testing import BenchTime, assert_close, bench_cpu_time, bench_gpu_time, summarize
from flashinfer.testing.cold_cache import copy_inputs
from flashinfer.testing.cupti import cupti_problem

__all__ = ["Peak", "Result", "Settings", "check", "measure", "peak_of", "time_run"]


@dataclass(frozen=True)
class Settings:
    """Timing settings. A count of ``None`` follows a time budget: 60 ms on a GPU, 1 s on a CPU (flushing is slow)."""

    device: str
    dry_run_iters: Optional[int] = None
    num_iters: Optional[int] = None
    cuda_graph: bool = False
    cupti: bool = False

    @property
    def timer(self) -> str:
        """Name of the timer in use. CUPTI only if it works, so that the fallback does not warn for every case."""
        if self.device == "cpu":
            return "host clock"
        if self.cupti and cupti_problem() is None:
            return "CUPTI"
        return "CUDA graph" if self.cuda_graph else "CUDA events"


@dataclass
class Result:
    """Measurement of one backend on one point."""

    routine: str
    point: dict[str, Any]
    device: str
    backend: str
    time: BenchTime  # seconds
    bytes: int
    flops: int
    fraction: Optional[float] = None  # achieved share of the limiting peak (bandwidth or operations), 0..1
    baseline: Optional[BenchTime] = None
    host_us: Optional[float] = None  # host time per call in microseconds; CUDA only

    @property
    def tb_per_sec(self) -> float:
        return self.bytes / self.time.median / 1e12

    @property
    def tflops(self) -> float:
        return self.flops / self.time.median / 1e12

    @property
    def speedup(self) -> Optional[float]:
        """Time of the torch baseline over ours."""
        return self.baseline.median / self.time.median if self.baseline else None


def time_run(run: Run, args: Any, settings: Settings, cold: bool = True) -> BenchTime:
    counts = {"dry_run_iters": settings.dry_run_iters, "repeat_iters": settings.num_iters, "dry_run_time_ms": 20}
    if settings.device == "cpu":
        return summarize(bench_cpu_time(run, **counts, repeat_time_ms=1000, input_args=args, cold_cache=cold))
    times = bench_gpu_time(
        run,
        **counts,
        repeat_time_ms=60,
        enable_cupti=settings.timer == "CUPTI",
        use_cuda_graph=settings.cuda_graph,
        input_args=args,
        cold_l2_cache=cold,
    )
    return summarize(times)


def host_time_us(run: Run, args: Any, calls: int = 50) -> float:
    """Return the median time until a call returns, without waiting for the GPU.

    Synchronises every 10 calls, so that the launch queue does not fill up.
    """
    times = []
    for i in range(calls):
        if i % 10 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run(*args)
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


class Peak:
    """Peak bandwidth and operation rates of a device, each measured on first use."""

    def __init__(self, device: str) -> None:
        self.device = device

    @functools.cached_property
    def bytes_per_sec(self) -> float:
        """Bandwidth of a copy far larger than any cache: bytes read plus bytes written, per second.

        An in-place op on a CPU may exceed this bandwidth: a line that was just read is written without a second fetch.
        """
        size = 1 << 30 if self.device == "cuda" else 256 << 20
        source = torch.ones(size // 4, device=self.device)  # written once, so that its pages exist
        target = torch.ones_like(source)
        return 2 * size / time_run(target.copy_, (source,), Settings(self.device), cold=False).median

    @functools.cache  # noqa: B019 - one Peak per device lives as long as the process
    def flops_per_sec(self, dtype: torch.dtype) -> float:
        """Measure a square matrix product of random numbers (zeros run faster). fp8 counts as twice the bf16 rate."""
        if dtype.itemsize == 1:
            return 2 * self.flops_per_sec(torch.bfloat16)
        n = 8192 if self.device == "cuda" else 1024
        a = torch.randn(n, n, device=self.device).to(dtype)
        return 2 * n**3 / time_run(torch.mm, (a, a), Settings(self.device), cold=False).median


peak_of = functools.cache(Peak)


def _fraction(bench: Bench, seconds: float, device: str) -> Optional[float]:
    """Return the achieved fraction of the limiting peak: bandwidth or operations, whichever is nearer to its peak."""
    peak = peak_of(device)
    parts = []
    if bench.bytes:
        parts.append(bench.bytes / seconds / peak.bytes_per_sec)
    if bench.flops:
        parts.append(bench.flops / seconds / peak.flops_per_sec(bench.flops_dtype))
    return max(parts, default=None)


def measure(
    routine: str, point: Mapping[str, Any], bench: Bench, settings: Settings, backend: Optional[str] = None
) -> Result:
    """Time one backend (default: the first) and torch's baseline."""
    backends = bench.backends(settings.device)
    backend = next(iter(backends)) if backend is None else backend
    run = backends[backend]
    taken = time_run(run, bench.args, settings)
    return Result(
        routine=routine,
        point=dict(point),
        device=settings.device,
        backend=backend,
        time=taken,
        bytes=bench.bytes,
        flops=bench.flops,
        fraction=_fraction(bench, taken.median, settings.device),
        baseline=time_run(bench.baseline, bench.args, settings) if bench.baseline and backend != "torch" else None,
        host_us=host_time_us(run, bench.args) if settings.device == "cuda" else None,
    )


def check(bench: Bench, run: Run, name: str) -> None:
    """Compare a run with the reference, each on its own copy of the inputs; ``AssertionError`` on a mismatch."""
    assert bench.reference is not None, f"{name}: has no reference to check against"
    expected = bench.reference(*copy_inputs(tuple(bench.args), cuda_only=False))
    mine = copy_inputs(tuple(bench.args), cuda_only=False)
    actual = run(*mine)
    if bench.results:
        actual = tuple(mine[i] for i in bench.results)
        expected = expected if isinstance(expected, tuple) else (expected,)
    rtol, atol = bench.tolerance or (None, None)
    assert_close(actual, expected, rtol, atol, name=name)
