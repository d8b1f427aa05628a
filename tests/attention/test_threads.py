# SPDX-License-Identifier: Apache-2.0
"""A wrapper shared by two threads: calls of different threads wait for each other."""

from __future__ import annotations

import contextlib
import copy
import inspect
import signal
import textwrap
import threading
from typing import Any, Callable

import pytest
import torch

import flashinfer
from flashinfer.attention.locks import CLOSED, CallLock, one_at_a_time

from ..fresh_process import run_python
from .inputs import Batch
from .wrappers import decode_batch, paged, workspace

#: Plans with equal rows and different keys in one thread, runs in two others. Every result matches one of the plans.
SHARED = """
    import sys, threading
    import torch, flashinfer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(8 << 20, dtype=torch.uint8))
    rows = torch.arange(0, 33, dtype=torch.int32)
    q, cache = torch.randn(32, 4, 64).half(), torch.randn(400, 2, 8, 2, 64).half()

    def plan(pages):
        ends = torch.arange(0, 32 * pages + 1, pages, dtype=torch.int32)
        last = torch.full((32,), 8, dtype=torch.int32)
        wrapper.plan(rows, ends, torch.arange(32 * pages, dtype=torch.int32), last, 4, 2, 64, 8)

    expected = []
    for pages in (1, 12):
        plan(pages)
        expected.append(wrapper.run(q, cache))
    assert not torch.equal(*expected)
    faults, stops = [], threading.Event()

    def run():
        try:
            while not stops.is_set():
                out = wrapper.run(q, cache)
                if not any(torch.equal(out, x) for x in expected):
                    faults.append("a result of no plan")
        except Exception as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(400):
        plan((1, 12)[i % 2])
    stops.set()
    for thread in threads:
        thread.join()
    sys.exit(f"{len(faults)} faults: {faults[0]}" if faults else 0)
"""


def test_plan_in_one_thread_and_run_in_others():
    """Run in a subprocess, because a corrupted heap would end it."""
    paged(Batch([1], [1]), Batch([1], [1]).pages(8))  # builds the module
    done = run_python(["-c", textwrap.dedent(SHARED)])
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["plan", "run", "reset_workspace_buffer"])
def test_a_call_waits_for_the_call_of_another_thread(name):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    begins, ends = threading.Event(), threading.Event()
    parameters = inspect.signature(getattr(wrapper, name)).parameters.values()
    nothing = [None for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]

    def call() -> None:
        begins.set()
        with contextlib.suppress(Exception):  # None is no tensor; the call fails once it has the lock
            getattr(wrapper, name)(*nothing)
        ends.set()

    thread = threading.Thread(target=call)
    with wrapper._lock:
        thread.start()
        begins.wait()
        assert not ends.wait(0.1)
    thread.join()
    assert ends.is_set()


def decode_calls() -> tuple[Any, Callable[[], torch.Tensor], Callable[[], None]]:
    """Return a decode wrapper, and its ``run`` and ``plan`` with arguments; the next ``run`` repeats a call."""
    batch = decode_batch("cpu")
    pages = batch.pages(8)
    cache = batch.cache(pages)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))

    def plan() -> None:
        wrapper.plan(*pages.table, *batch.heads, 64, 8)

    plan()
    for _ in range(2):
        wrapper.run(batch.q, cache)
    assert wrapper._record is not None
    return wrapper, lambda: wrapper.run(batch.q, cache), plan


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, threading.Event]:
    ends = threading.Event()

    def whole() -> None:
        call()
        ends.set()

    thread = threading.Thread(target=whole)
    thread.start()
    return thread, ends


def test_all_calls_wait_for_a_repeated_call():
    """Stand for a repeated call by taking what it takes: neither a plan nor another repeated call begins."""
    wrapper, run, plan = decode_calls()
    expected = run()
    wrapper._lock.calls.pop()
    threads = [in_thread(run), in_thread(plan), in_thread(run)]
    assert not threads[0][1].wait(0.1) and not threads[1][1].is_set() and not threads[2][1].is_set()
    wrapper._lock.calls.append(None)
    for thread, ends in threads:
        thread.join(60)
        assert ends.is_set()
    assert wrapper._lock.free is wrapper._lock.calls == [None]
    assert torch.equal(run(), expected)


def test_a_repeated_call_waits_for_a_holder_of_the_lock():
    wrapper, run, _ = decode_calls()
    with wrapper._lock:
        run()  # in the thread that holds the lock
        assert wrapper._lock.free is CLOSED
        thread, ends = in_thread(run)
        assert not ends.wait(0.1)
    thread.join(60)
    assert ends.is_set() and wrapper._lock.free == [None]


@pytest.mark.parametrize("error", [ValueError("on purpose"), KeyboardInterrupt("on purpose")])
def test_a_repeated_call_that_fails_gives_everything_back(error):
    wrapper, run, plan = decode_calls()
    expected = run()

    def fail(*_: Any) -> None:
        raise error

    wrapper._record.rerun = fail
    if isinstance(error, Exception):
        assert torch.equal(run(), expected)  # validated and launched again
    else:
        with pytest.raises(KeyboardInterrupt, match="on purpose"):
            run()
    assert wrapper._lock.free == [None]
    thread, ends = in_thread(plan)
    thread.join(60)
    assert ends.is_set()


def test_copies_have_locks_of_their_own():
    attention = flashinfer.BatchAttention(device="cpu")
    for twin in (copy.copy(attention), copy.deepcopy(attention)):
        locks = {id(x._lock) for x in (attention, attention._wrapper, twin, twin._wrapper)}
        assert len(locks) == 4


def test_every_name_of_a_method_is_one_function():
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper
    assert wrapper.begin_forward is wrapper.plan


def test_the_lock_is_given_back_after_an_exception():
    class Guarded:
        def __init__(self) -> None:
            self._lock = CallLock()

        @one_at_a_time
        def fail(self) -> None:
            raise ValueError("on purpose")

    guarded = Guarded()
    with pytest.raises(ValueError, match="on purpose"):
        guarded.fail()
    got = []
    thread = threading.Thread(target=lambda: got.append(guarded._lock.acquire(timeout=1)))
    thread.start()
    thread.join()
    assert got == [True]


def test_a_signal_may_end_the_wait_for_the_lock():
    """Interrupt a call that waits: its own exception comes out, and the lock stays with the thread that has it."""

    class Guarded:
        def __init__(self) -> None:
            self._lock = CallLock()

        @one_at_a_time
        def reach(self) -> None:
            raise AssertionError("reached without the lock")

    def stop(*_: object) -> None:
        raise InterruptedError("on purpose")

    guarded, holds, ends = Guarded(), threading.Event(), threading.Event()

    def hold() -> None:
        with guarded._lock:
            holds.set()
            ends.wait(60)

    thread = threading.Thread(target=hold)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        thread.start()
        holds.wait()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(InterruptedError, match="on purpose"):
            guarded.reach()
        assert not guarded._lock.acquire(blocking=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        ends.set()
        thread.join()


def test_a_thread_may_call_from_inside_a_call():
    """Check reentrant calls: ``forward`` calls ``run``, and composed wrappers call their parts."""
    batch = Batch([5, 3], [20, 9])
    pages = batch.pages(8)
    wrapper = paged(batch, pages)
    assert torch.equal(wrapper.forward(batch.q, batch.cache(pages)), wrapper.run(batch.q, batch.cache(pages)))
