# SPDX-License-Identifier: Apache-2.0
"""Host time that a wrapper's lock, its comparison of streams and its look for traces add to ``run()``.

    python benchmarks/lock_cost.py --device cuda

``locked`` is ``run()`` as callers call it, ``bare`` the function that it wraps; ``empty`` is the same for a method that
has the parameters of a decode wrapper's ``run()`` and does nothing. All are measured in turn, in blocks of calls, so
that a change of the CPU's clock meets all of them; the figure is the minimum over the blocks, because other programs
only add time. ``--empty`` leaves the kernels out, for a busy machine. A call must not cost 0.2 us more than without the
lock.
"""

from __future__ import annotations

import argparse
import inspect
import time
from typing import Any, Callable

import torch

import flashinfer
from flashinfer.attention import streams
from flashinfer.attention.locks import Serialised

CALLS = 200  # per block; launches of one block fit into the queue of a GPU


class Empty(Serialised):
    """Wrapper without work, with the lock, the streams and the parameters of the decode wrapper."""

    def __init__(self, device: str) -> None:
        self._follow_streams(torch.device(device))

    def run(
        self,
        q: Any,
        cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: Any = None,
        window_left: Any = None,
        sinks: Any = None,
        q_len_per_req: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
        kv_cache_sf: Any = None,
    ) -> None:
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


def pair(run: Any, wrapper: Any, arguments: tuple[Any, ...], out: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return two functions without arguments that call ``run`` with and without the lock."""
    bare = inspect.unwrap(run)
    return lambda: run(wrapper, *arguments, out=out), lambda: bare(wrapper, *arguments, out=out)


def measure(device: str, blocks: int, only_empty: bool = False) -> dict[str, float]:
    """Return the host time in microseconds of a call with and without the lock, and of a comparison of streams."""
    calls: dict[str, Callable[[], Any]] = {}
    if not only_empty:
        wrapper, arguments = planned(device)
        out = torch.empty_like(arguments[0])
        calls["locked"], calls["bare"] = pair(type(wrapper).run, wrapper, arguments, out)
    empty = Empty(device)
    calls["empty locked"], calls["empty bare"] = pair(Empty.run, empty, (1, 2), 3)
    if device == "cuda":
        calls["stream"] = lambda: streams.raw_stream(0) != empty._stream
    for call in calls.values():
        seconds(call, device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(blocks):
        for name, call in calls.items():
            times[name].append(seconds(call, device))
    return {name: min(x) * 1e6 for name, x in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--empty", action="store_true", help="measure the method that does nothing only")
    options = parser.parse_args()
    times = measure(options.device, options.blocks, options.empty)
    print(", ".join(f"{name} {x:.3f} us" for name, x in times.items()))
    for kind in ("", "empty "):
        if f"{kind}locked" in times:
            print(f"{kind}run(): {times[f'{kind}locked'] - times[f'{kind}bare']:.3f} us a call")


if __name__ == "__main__":
    main()
