# SPDX-License-Identifier: Apache-2.0
"""Time one tactic."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import statistics
import threading
from typing import Any, Callable, Iterator, Optional, Sequence

import torch

from .._runtime.knobs import knobs
from .._runtime.probes import probes

__all__ = ["is_capturing", "is_in_profile_measurement", "median_ms", "refuse_capture"]

ReadClock = Callable[[torch.Tensor], None]

_log = logging.getLogger("flashinfer")
_state = threading.local()


def is_in_profile_measurement() -> bool:
    """Return True if this thread is measuring a tactic: a runner may then skip work that only a serving call needs.

    Examples
    --------
    >>> flashinfer.autotuner.is_in_profile_measurement()
    False
    """
    return getattr(_state, "measuring", False)


@contextlib.contextmanager
def _measuring() -> Iterator[None]:
    before, _state.measuring = is_in_profile_measurement(), True
    try:
        yield
    finally:
        _state.measuring = before


def is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(op: str) -> None:
    if is_capturing():
        raise RuntimeError(
            f"autotune: {op} must be called inside autotune() before a capture, got sizes that were not tuned inside "
            "an active outer CUDA Graph capture"
        )


def median_ms(
    call: Callable[[list[Any]], Any],
    lists: Sequence[list[Any]],
    *,
    warmup: int,
    repeat: int,
    delay_us: int,
    is_cold: bool,
    use_cuda_graph: bool,
    uses_events: bool = False,
) -> float:
    """Return the median milliseconds of ``call(inputs)`` on the first tensor's device; calls take the lists in turn."""
    from ..testing.cold_cache import CacheFlush
    from ..testing.timers import capture, time_by_events, time_on_host

    device = next((x.device for x in lists[0] if isinstance(x, torch.Tensor)), torch.device("cpu"))
    flush = CacheFlush(device, None) if is_cold else None
    calls: list[Callable[[], Any]] = [functools.partial(call, inputs) for inputs in lists]
    with _measuring():
        if device.type != "cuda":
            for _ in range(warmup):
                calls[-1]()
            next_call = _in_turn(calls)
            return statistics.median(time_on_host(next_call, flush) for _ in range(repeat))
        with torch.cuda.device(device):
            if use_cuda_graph:
                calls = [capture(one).replay for one in calls]
            for _ in range(warmup):
                calls[-1]()
            torch.cuda.synchronize()
            # The GPU is kept busy first, so that it does not wait for the host between kernels. The delay is in cycles:
            # about half of the requested time at current clock rates.
            if delay_us:
                torch.cuda._sleep(delay_us * 1000)
            read_clock = None if uses_events else _globaltimer()
            if read_clock is None:
                return statistics.median(time_by_events(_in_turn(calls), repeat, flush))
            return statistics.median(_time_by_globaltimer(_in_turn(calls), repeat, flush, read_clock, device))


def _globaltimer() -> Optional[ReadClock]:
    """Return the function that reads the GPU's clock if trials use the clock; None if trials use CUDA events."""
    if (knobs.autotune_timer or ("globaltimer" if probes.is_confidential_compute() else "cuda_event")) == "cuda_event":
        return None
    read_clock = probes.get_globaltimer_kernel()
    if read_clock is None:
        _log.warning("autotune: the globaltimer kernel cannot be built; trials are timed by CUDA events")
    return read_clock


def _time_by_globaltimer(
    call: Callable[[], Any], repeat: int, flush: Optional[Callable[[], None]], read_clock: ReadClock, device: Any
) -> list[float]:
    """Return the milliseconds of each call between two reads of the GPU's own clock, on the current stream."""
    nanoseconds = torch.zeros(repeat, 2, dtype=torch.int64, device=device)
    places = nanoseconds.view(-1).split(1)
    for i in range(repeat):
        if flush:
            flush()
        read_clock(places[2 * i])
        call()
        read_clock(places[2 * i + 1])
    return [(end - begin) / 1e6 for begin, end in nanoseconds.tolist()]


def _in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    turns = itertools.cycle(calls)
    return lambda: next(turns)()
