# SPDX-License-Identifier: Apache-2.0
"""Host time that a wrapper's lock and its comparison of streams add to ``run()``.

    python benchmarks/lock_cost.py --device cuda

``locked`` is ``run()`` of a decode wrapper that repeats its last launch, ``bare`` the same with the text of ``repeat``
less the lock. ``empty`` is ``repeat`` alone, with and without the lock, that repeats nothing. ``method`` is what the
full lock, the stream and the look for traces add to any other call (``plan()``, a ``run()`` with other parameters).
All are measured in turn, in blocks of calls, so that a change of the CPU's clock meets all of them; the figure is the
minimum over the blocks, because other programs only add time. ``--empty`` leaves the kernels out, for a busy machine.
A repeated call must not cost 0.2 us more than without the lock.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
import time
from typing import Any, Callable

import torch

import flashinfer
from flashinfer.attention import streams
from flashinfer.attention.locks import CallLock, one_at_a_time
from flashinfer.attention.run import repeat

CALLS = 200  # per block; launches of one block fit into the queue of a GPU
Wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper


def repeat_of(locks: bool, works: bool) -> Callable[..., Any]:
    """Return ``repeat`` (attention/run.py) from its source, with or without the lock and what the lock protects."""
    source = textwrap.dedent(inspect.getsource(repeat))
    module = ast.parse(source)
    (function,) = module.body
    assert isinstance(function, ast.FunctionDef)
    (guarded,) = (x for x in function.body if isinstance(x, ast.Try) and x.finalbody)
    (entered,) = (x for x in guarded.body if isinstance(x, ast.If))
    if not works:
        entered.body = ast.parse("if True:\n    return None").body[0].body  # type: ignore[attr-defined]
    if not locks:
        begin = next(i for i, x in enumerate(function.body) if "wrapper._lock" in ast.unparse(x))
        function.body[begin:] = entered.body
    scope = dict(repeat.__globals__)
    exec(compile(ast.fix_missing_locations(module), f"<repeat, {locks=}, {works=}>", "exec"), scope)
    return scope["repeat"]


class Bare(Wrapper):
    """Decode wrapper that repeats calls without a lock."""

    _repeat = repeat_of(locks=False, works=True)


class Empty:
    """Wrapper without work, with the lock and the streams of the decode wrapper."""

    locked = repeat_of(locks=True, works=False)
    bare = repeat_of(locks=False, works=False)

    def __init__(self, device: str) -> None:
        self._lock = CallLock()
        self._lock.follow_streams(torch.device(device))

    def method(self, a: Any, b: Any) -> None:
        pass

    locked_method = one_at_a_time(method)


def planned(device: str, cls: type[Wrapper]) -> tuple[Any, tuple[Any, ...]]:
    """Return a planned decode wrapper for four requests of one page, and the arguments of ``run``."""
    wrapper = cls(torch.empty(8 << 20, dtype=torch.uint8, device=device))
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


def running(device: str, cls: type[Wrapper]) -> Callable[[], Any]:
    wrapper, arguments = planned(device, cls)
    out = torch.empty_like(arguments[0])
    return lambda: wrapper.run(*arguments, out=out)


def measure(device: str, blocks: int, only_empty: bool = False) -> dict[str, float]:
    """Return the host time in microseconds of calls with and without the lock, and of a comparison of streams."""
    calls: dict[str, Callable[[], Any]] = {}
    if not only_empty:
        calls["locked"], calls["bare"] = running(device, Wrapper), running(device, Bare)
    empty, arguments = Empty(device), (None,) * 10
    calls["empty locked"] = lambda: empty.locked(*arguments)
    calls["empty bare"] = lambda: empty.bare(*arguments)
    calls["method locked"] = lambda: empty.locked_method(1, 2)
    calls["method bare"] = lambda: empty.method(1, 2)
    if device == "cuda":
        calls["stream"] = lambda: streams.raw_stream(0) != empty._lock.stream
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
    parser.add_argument("--empty", action="store_true", help="measure calls that do nothing only")
    options = parser.parse_args()
    times = measure(options.device, options.blocks, options.empty)
    print(", ".join(f"{name} {x:.3f} us" for name, x in times.items()))
    for kind in ("", "empty ", "method "):
        if f"{kind}locked" in times:
            print(f"{kind or 'run() '}lock: {times[f'{kind}locked'] - times[f'{kind}bare']:.3f} us a call")


if __name__ == "__main__":
    main()
