# SPDX-License-Identifier: Apache-2.0
"""How long one tactic takes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import threading
from typing import Any, Callable, Iterator, Sequence

import torch

__all__ = ["is_capturing", "is_in_profile_measurement", "median_ms", "refuse_capture"]

_state = threading.local()


def is_in_profile_measurement() -> bool:
    """Whether this thread is measuring a tactic: a runner may leave out what a serving call needs."""
    return getattr(_state, "measuring", False)


@contextlib.contextmanager
def _measuring() -> Iterator[None]:
    before, _state.measuring = is_in_profile_measurement(), True
    try:
        yield
    finally:
        _state.measuring = before


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def refuse_capture(op: str) -> None:
    if is_capturing():
        raise RuntimeError(
            f"autotune: {op} has sizes that were not tuned inside an active outer CUDA Graph capture, expected a call "
            "inside autotune() before the capture"
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
) -> float:
    """Median milliseconds of ``call(inputs)``, on the device of the first tensor; calls take turns with the lists."""
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
            # The GPU is kept busy first, so that it does not wait for the host between kernels. In cycles: about half
            # of the time at the clocks of today.
            torch.cuda._sleep(delay_us * 1000)
            return statistics.median(time_by_events(_in_turn(calls), repeat, flush))


def _in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    turns = itertools.cycle(calls)
    return lambda: next(turns)()
