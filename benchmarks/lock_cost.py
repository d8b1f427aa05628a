# SPDX-License-Identifier: Apache-2.0
"""Host time that a wrapper's lock, its comparison of streams and its look for traces add to ``run()``.

    python benchmarks/lock_cost.py --device cuda

``locked`` is ``run()`` as callers call it, ``bare`` the function that it wraps; ``empty`` is the same for a method that
does nothing, which shows the difference on a busy machine too. All are measured in turn, in blocks of calls, so that a
change of the CPU's clock meets all of them; the figure is the median over the blocks. A call must not cost 0.2 us more
than without the lock.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from typing import Any, Callable

import torch

import flashinfer
from flashinfer.attention import streams
from flashinfer.attention.locks import Serialised

CALLS = 200  # per block; launches of one block fit into the queue of a GPU


class Empty(Serialised):
    """Wrapper without work, with the lock and the streams of the others."""

    def __init__(self, device: str) -> None:
        self._follow_streams(torch.device(device))

    def run(self, q: Any, cache: Any, out: Any = None) -> None:
        pass


def planned(device: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a planned decode wrapper for four requests of one page, and the arguments of ``run``."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8 << 20, dtype=torch.uint8, device=device))
    pages = torch.arange(5, dtype=torch.int32)
    wrapper.plan(pages, pages[:4], torch.full((4,), 16, dtype=torch.int32), 4, 1, 64, 16, q_data_type=torch.float16)
    q = torch.randn(4, 4, 64, device=device).half()
    return wrapper, (q, torch.randn(4, 2, 16, 1, 64, device=device).half())


def seconds(call: Callable[[], Any], device: str) -> float:
    """Return the host time of one call."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    taken = time.perf_counter() - begin
    if device == "cuda":
        torch.cuda.synchronize()
    return taken / CALLS


def measure(device: str, blocks: int) -> dict[str, float]:
    """Return the host time in microseconds of a call with and without the lock, and of a comparison of streams."""
    wrapper, arguments = planned(device)
    out = torch.empty_like(arguments[0])
    run, nothing, empty = type(wrapper).run, Empty.run, Empty(device)
    bare, bare_nothing = inspect.unwrap(run), inspect.unwrap(nothing)
    calls: dict[str, Callable[[], Any]] = {
        "locked": lambda: run(wrapper, *arguments, out=out),
        "bare": lambda: bare(wrapper, *arguments, out=out),
        "empty locked": lambda: nothing(empty, *arguments, out=out),
        "empty bare": lambda: bare_nothing(empty, *arguments, out=out),
    }
    if device == "cuda":
        calls["stream"] = lambda: streams.raw_stream(0) != wrapper._stream
    for call in calls.values():
        seconds(call, device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(blocks):
        for name, call in calls.items():
            times[name].append(seconds(call, device))
    return {name: statistics.median(x) * 1e6 for name, x in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--blocks", type=int, default=200)
    options = parser.parse_args()
    times = measure(options.device, options.blocks)
    print(", ".join(f"{name} {x:.3f} us" for name, x in times.items()))
    for kind in ("", "empty "):
        print(f"{kind}run(): {times[f'{kind}locked'] - times[f'{kind}bare']:.3f} us a call")


if __name__ == "__main__":
    main()
