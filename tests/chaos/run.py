# SPDX-License-Identifier: Apache-2.0
"""Cold starts by several processes on one cache while faults are injected.

python -m tests.chaos.run --starts 200 --report chaos.md

A round changes the source of a tiny module, injects a fault, and starts four processes that each build or load the
module and call it. A process into which no fault was injected must return the right answer; one into which a fault was
injected may raise an error or be killed, but not return a wrong answer or hang. After each round a clean process must
get the right answer, every lock must be free, and no private folder of a builder may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator, Optional, Sequence

from filelock import FileLock, Timeout

from flashinfer.jit import JitSpec, jit_spec_registry
from tests.chaos.faults import BEFORE, DURING, KILL, Round
from tests.jit.toolbox import Workshop

PROCESSES = 4
HANG_S = 120.0  # a build takes 0.2 s on an idle machine


@dataclass
class Report:
    """Counts of a run."""

    starts: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  #: errors of processes into which a fault was injected
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [f"| {name} | {count} | {self.errors[name]} |" for name, count in sorted(self.faults.items())]
        return "\n".join(
            [
                f"{self.starts} cold starts by {PROCESSES} processes, {self.faults.total()} faults injected, "
                f"{len(self.failures)} failures, {self.seconds:.0f} s (Python {platform.python_version()}, "
                f"{len(os.sched_getaffinity(0))} cores)",
                "",
                "| fault | injected | reported as an error by the process concerned |",
                "|---|---|---|",
                *rows,
                *[f"\nFAILURE: {text}" for text in self.failures],
            ]
        )


@dataclass
class Child:
    """A forked process, the pipe its answer comes through, and the fault injected into it."""

    pid: int
    pipe: int
    fault: str = ""


def start(function: Callable[[], object], fault: str = "") -> Child:
    """Fork a process that writes the ``repr`` of a result, or of an error, to a pipe. It imports nothing again."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return Child(pid, read, fault)
    os.close(read)
    try:
        with open(os.devnull, "w") as silent:  # progress and errors of builds that are meant to fail
            os.dup2(silent.fileno(), 1)
            os.dup2(silent.fileno(), 2)
        text = repr(function())
    except BaseException as error:
        text = "error: " + "".join(traceback.format_exception_only(error))
    with contextlib.suppress(OSError):
        os.write(write, text.encode()[:4000])
    os._exit(0)


def collect(child: Child, deadline: float) -> str:
    """Return what a process wrote: an answer, ``error: ...``, "" if it was killed, ``hang`` after the deadline."""
    ready, _, _ = select.select([child.pipe], [], [], max(deadline - time.monotonic(), 0))
    if not ready:
        os.kill(child.pid, signal.SIGKILL)
    text = os.read(child.pipe, 4096).decode() if ready else "hang"
    os.close(child.pipe)
    os.waitpid(child.pid, 0)
    return text


def answer_of(spec: JitSpec) -> int:
    return spec.build_and_load().answer()


class Chaos:
    """A cache, a module and the random numbers of a run; :meth:`play` is one round."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.workshop, self.numbers, self.report = Workshop(folder), random.Random(seed), Report()
        os.environ.update(CXX=str(self.workshop.cxx), FLASHINFER_WORKSPACE_BASE=str(folder / "base"), MAX_JOBS="1")
        self.spec = self.workshop.spec()

    def play(self, name: str) -> None:
        """Inject the fault ``name`` into a round of cold starts, and check what the processes and the cache say."""
        at = Round(self.spec, self.workshop.src, self.numbers)
        if name in BEFORE:  # what is damaged or foreign was good before
            self.check_clean_start(name)
            BEFORE[name](at)
        if name not in BEFORE or name == "clock skew":
            self.workshop.set_answer(self.numbers.randrange(1, 10**9))
        if name == "clock skew":
            BEFORE[name](at)
        self.report.faults[name] += 1
        expected = repr(self.answer())

        def inject() -> object:
            DURING[name](at)
            return answer_of(self.spec)

        children = [start(inject, name)] if name in DURING else []
        children += [start(lambda: answer_of(self.spec)) for _ in range(PROCESSES - len(children))]
        self.report.starts += PROCESSES
        if name == KILL:
            children[0].fault = name
            time.sleep(self.numbers.uniform(0, 0.4))
            os.kill(children[0].pid, signal.SIGKILL)
        deadline = time.monotonic() + HANG_S
        for i, child in enumerate(children):
            self.judge(collect(child, deadline), expected, child.fault, f"{name}, process {i}")
        self.check_clean_start(name)
        self.check_nothing_is_left(name)

    def answer(self) -> int:
        return int((self.workshop.src / "answer.h").read_text().split()[-1])

    def judge(self, found: str, expected: str, fault: str, who: str) -> None:
        if found == expected:
            return
        excused = found == "" or found.startswith("error: ")
        if fault and excused:
            self.report.errors[fault] += 1
        else:
            self.report.failures.append(f"{who}: got {found or 'no answer'}, expected {expected}")

    def check_clean_start(self, name: str) -> None:
        """A process without any fault must get the right answer."""
        self.report.starts += 1
        child = start(lambda: answer_of(self.spec))
        self.judge(collect(child, time.monotonic() + HANG_S), repr(self.answer()), "", f"clean start, {name}")

    def check_nothing_is_left(self, name: str) -> None:
        """Check for locks that are still held, and for private folders of builders that died."""
        try:
            with FileLock(str(self.spec.lock_path), timeout=5):
                left = [path.name for path in self.spec.build_dir.glob(".build-*")]
        except Timeout:
            left = [self.spec.lock_path.name]
        if left and name != KILL:
            self.report.failures.append(f"{name}: left {', '.join(left)}")


def faults_in_turn(numbers: random.Random) -> Iterator[str]:
    """Yield every fault once in random order, then again."""
    names = [KILL, *BEFORE, *DURING]
    while True:
        yield from numbers.sample(names, len(names))


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    before, specs = dict(os.environ), dict(jit_spec_registry._specs)
    for name in list(os.environ):
        if name.startswith("FLASHINFER_") or name in ("CC", "CXX", "MAX_JOBS"):
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        jit_spec_registry._specs = specs


def run(starts: int = 200, seconds: float = 1e9, seed: int = 0, faults: Optional[Sequence[str]] = None) -> Report:
    """Play rounds until there were ``starts`` cold starts, or until ``seconds`` have passed.

    ``faults`` are played once each, instead of all of them in turn.
    """
    with own_environment(), tempfile.TemporaryDirectory(prefix="flashinfer-chaos-") as folder:
        chaos = Chaos(Path(folder), seed)
        begin = time.monotonic()
        for name in faults or faults_in_turn(chaos.numbers):
            if not faults and (chaos.report.starts >= starts or time.monotonic() - begin > seconds):
                break
            chaos.play(name)
        chaos.report.seconds = time.monotonic() - begin
        return chaos.report


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="Markdown file to write besides the output")
    arguments = parser.parse_args(argv)
    report = run(arguments.starts, arguments.seconds, arguments.seed)
    print(report)
    if arguments.report:
        arguments.report.write_text(f"{report}\n")
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
