# SPDX-License-Identifier: Apache-2.0
"""How long one tactic takes."""

from __future__ import annotations

import contextlib
import statistics
import threading
from typing import Any, Callable, Iterator, Sequence

import torch

__all__ = ["is_in_profile_measurement", "median_ms", "refuse_capture"]

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


def refuse_capture(op: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"autotune: {op} is being captured in a CUDA graph with sizes that were not tuned, expected a call inside "
            "autotune() before the capture"
        )


def median_ms(
    call: Callable[[], Any],
    inputs: Sequence[Any],
    *,
    warmup: int,
    repeat: int,
    delay_us: int,
    is_cold: bool,
    use_cuda_graph: bool,
) -> float:
    """Median milliseconds of a call, on the device of the first tensor among the inputs."""
    from ..testing.cold_cache import CacheFlush
    from ..testing.timers import capture, time_by_events, time_on_host

    device = next((x.device for x in inputs if isinstance(x, torch.Tensor)), torch.device("cpu"))
    flush = CacheFlush(device, None) if is_cold else None
    with _measuring():
        if device.type != "cuda":
            for _ in range(warmup):
                call()
            return statistics.median(time_on_host(call, flush) for _ in range(repeat))
        with torch.cuda.device(device):
            once = capture(call).replay if use_cuda_graph else call
            for _ in range(warmup):
                once()
            torch.cuda.synchronize()
            # The GPU is kept busy first, so that it does not wait for the host between kernels. In cycles: about half
            # of the time at the clocks of today.
            torch.cuda._sleep(delay_us * 1000)
            return statistics.median(time_by_events(once, repeat, flush))
