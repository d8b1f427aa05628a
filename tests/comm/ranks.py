# SPDX-License-Identifier: Apache-2.0
"""Processes that are the ranks of tests: started once per run, joined by gloo, given functions to call.

def double(comm, x):                         # at the top of a test module: it is pickled by name
    return comm.allgather(2 * x)

def test_double(ranks):
    assert ranks(2).run(double, 5) == [(10, 10), (10, 10)]
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

#: Seconds after which a call of all ranks counts as hanging.
SECONDS = 120

#: Seconds that an exchange waits for a rank, in processes and in threads of tests.
LIMIT_S = 10

#: Seconds that the other ranks get once one has failed.
AFTER_FAILURE = LIMIT_S + 2


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Set how long workspaces that are made inside wait for a rank."""
    before = os.environ["FLASHINFER_COMM_TIMEOUT_S"]
    os.environ["FLASHINFER_COMM_TIMEOUT_S"] = str(seconds)
    try:
        yield
    finally:
        os.environ["FLASHINFER_COMM_TIMEOUT_S"] = before


def held() -> tuple[int, int, list[str]]:
    """Return what this process holds: descriptors, mappings of memory files, files of shared memory."""
    gc.collect()  # views of memory of earlier tests
    maps = Path("/proc/self/maps").read_text().count("memfd:flashinfer")
    return len(os.listdir("/proc/self/fd")), maps, sorted(os.listdir("/dev/shm"))


class Failure(NamedTuple):
    """An exception of a rank: names of its classes, most derived first, its text and where it came from."""

    classes: tuple[str, ...]
    text: str
    trace: str


class Ranks:
    """Worker processes of one process group."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "flashinfer.comm"])
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = str(Path(self._folder.name, "store"))
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(comm, *arguments)`` on all ranks; return results, or a :class:`Failure` for exceptions."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        found: dict[int, Any] = {}
        deadline = time.monotonic() + SECONDS
        while len(found) < self.size:
            missing = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            ready = wait(list(missing), max(deadline - time.monotonic(), 0))
            for pipe in ready:
                try:
                    found[missing[pipe]] = pipe.recv()
                except EOFError:
                    found[missing[pipe]] = Failure(("ProcessLookupError",), "the process has ended", "it has ended")
            failed = any(isinstance(result, Failure) for result in found.values())
            if failed and len(found) < self.size:  # the others may be waiting for this rank
                deadline = min(deadline, time.monotonic() + AFTER_FAILURE)
            if not ready:
                self.close()
                texts = "".join(f"\nrank {rank}: {getattr(one, 'trace', 'done')}" for rank, one in found.items())
                raise AssertionError(
                    f"ranks {sorted(missing.values())} did not come back from {function.__name__}{texts}"
                )
        return [found[rank] for rank in range(self.size)]

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what the function returned on each rank; no rank may fail."""
        found = self.outcomes(function, *arguments)
        if any(isinstance(result, Failure) for result in found):
            self.close()  # ranks may be in different collectives now
        for rank, result in enumerate(found):
            assert not isinstance(result, Failure), f"rank {rank}: {result.trace}"
        return found

    def fail(self, function: Callable[..., Any], *arguments: Any) -> list[Failure]:
        """Return the exception of each rank; all ranks must fail."""
        found = self.outcomes(function, *arguments)
        for rank, result in enumerate(found):
            assert isinstance(result, Failure), f"rank {rank} did not fail and returned {result!r}"
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()
        if _started.get(self.size) is self:
            del _started[self.size]


_started: dict[int, Ranks] = {}


def started_ranks(size: int) -> Ranks:
    """Return the ``size`` worker processes of this run."""
    if size not in _started:
        _started[size] = Ranks(size)
        atexit.register(_started[size].close)
    return _started[size]


def _work(rank: int, size: int, store: str, calls: Any) -> None:
    import torch

    from flashinfer.comm.comm_backend import TorchDistBackend

    os.environ["FLASHINFER_COMM_TIMEOUT_S"] = str(LIMIT_S)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    comm = TorchDistBackend()
    while True:
        try:
            function, arguments = calls.recv()
        except EOFError:
            return
        try:
            result = function(comm, *arguments)
        except Exception as error:
            names = tuple(kind.__name__ for kind in type(error).__mro__)
            result = Failure(names, str(error), traceback.format_exc())
        calls.send(result)
