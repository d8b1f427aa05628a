#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run compute-sanitizer over a few small CUDA tests of every family, on one GPU, with one command:

    python3 scripts/sanitize.py                                all families under memcheck, racecheck and synccheck
    python3 scripts/sanitize.py --tools memcheck --families rope page --jobs 4
    python3 scripts/sanitize.py --list                         print the families and their tests, run nothing

The tests run once without a tool, which builds the modules; a family whose build does not end well is not run under
a tool. Each line then has the tool, the family, the number of tests that passed, the errors found and the
seconds. The output of each process is kept in ``--out``. The exit status is 0 if every family passed under every tool.

Only kernels of the namespace ``flashinfer`` are checked. Matrix products of references are computed on the host: those
of torch fail under racecheck, and their libraries take long to load. Under memcheck torch keeps no freed memory, so
that an access beyond a tensor is an access beyond an allocation.

Modules are built with FLASHINFER_RACECHECK: racecheck does not know that bar.arrive, and __syncwarp before the arrival
of one lane at an mbarrier, order accesses to shared memory, so all lanes arrive there, or wait.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from sanitized_tests import CAPTURES, FAMILIES

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck")


@dataclass
class Result:
    """Counts that one process reported."""

    family: str
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    errors: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.passed > 0 and not (self.failed or self.errors or self.notes)

    def line(self, step: str) -> str:
        more = "".join(f", {n} {what}" for n, what in ((self.skipped, "skipped"), (self.failed, "failed")) if n)
        notes = f"  ({'; '.join(self.notes)})" if self.notes else ""
        verdict = "ok  " if self.is_good else "FAIL"
        counts = f"{self.passed:3} passed{more}, {self.errors} errors, {self.seconds:.0f} s"
        return f"{verdict} {step:9} {self.family:22} {counts}{notes}"


def read(result: Result, text: str, tool: str) -> None:
    """Take the counts from the output of pytest and of the tool."""
    ends = re.findall(r"^.*\b(?:passed|failed|skipped|errors?|no tests ran)\b.* in [\d.]+s.*$", text, re.MULTILINE)
    for n, what in re.findall(r"(\d+) (passed|skipped|failed|error)", ends[-1] if ends else ""):
        name = "failed" if what == "error" else what
        setattr(result, name, getattr(result, name) + int(n))
    if tool:
        summaries = re.findall(r"ERROR SUMMARY: (\d+) error", text)
        summaries += re.findall(r"RACECHECK SUMMARY: (\d+) hazard", text)
        result.errors = sum(map(int, summaries))
        if not summaries:
            result.notes.append(f"{tool} printed no summary")


def check(tool: str, family: str, options: argparse.Namespace) -> Result:
    """Run the tests of a family in a process, under ``tool`` unless it is empty."""
    chosen = [pick for pick in FAMILIES[family] if not tool or pick.skips != tool]
    files = sorted({f"tests/{pick.file}" for pick in chosen})
    limit = options.seconds if tool else options.build_seconds
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "sanitized_tests",
        "--tb=short",
        "-rfE",
    ]
    picks = json.dumps([dataclasses.astuple(pick) for pick in chosen])
    command += ["-p", "sanitized_tests", "--picks", picks, "--seconds", str(0.6 * limit), *files]
    environment = os.environ | {"MAX_JOBS": os.environ.get("MAX_JOBS", "4"), "OMP_NUM_THREADS": "2"}
    paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    for flags in ("FLASHINFER_EXTRA_CFLAGS", "FLASHINFER_EXTRA_CUDAFLAGS"):
        environment[flags] = f"{os.environ.get(flags, '')} -DFLASHINFER_RACECHECK".strip()
    if tool:
        environment |= {"FLASHINFER_DISABLE_JIT": "1"}
        processes = "all" if family in CAPTURES else "application-only"
        checked = ["--kernel-name", "kns=flashinfer", "--target-processes", processes]
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *checked, *command]
    if tool == "memcheck" and not options.caching and family not in CAPTURES:
        environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result, begin, log = Result(family), time.monotonic(), options.out / f"{tool or 'build'}_{family}.txt"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = 0
            result.notes.append(f"stopped after {limit:.0f} s")
    result.seconds = time.monotonic() - begin
    read(result, log.read_text(errors="replace"), tool)
    if code not in (0, 1, 9) or (code == 9 and not result.errors):
        result.notes.append(f"exit {code}")
    return result


def run_step(tool: str, families: list[str], options: argparse.Namespace) -> list[Result]:
    """Run the families in parallel and print a line for each as it ends."""
    results = []

    def one(family: str) -> None:
        left = options.until - time.monotonic()
        result = check(tool, family, options) if left > 0 else Result(family, notes=["not begun: no time was left"])
        print(result.line(tool or "build"), flush=True)
        results.append(result)

    with ThreadPoolExecutor(options.jobs if tool else options.build_jobs) as pool:
        list(pool.map(one, families))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), metavar="TOOL")
    parser.add_argument("--jobs", type=int, default=12, help="processes at once under a tool")
    parser.add_argument("--build-jobs", type=int, default=16, help="processes at once while modules are built")
    parser.add_argument("--seconds", type=float, default=100, help="seconds that a process may take under a tool")
    parser.add_argument("--build-seconds", type=float, default=240, help="seconds that it may take to build")
    parser.add_argument("--total", type=float, default=1e9, help="seconds after which no process is begun")
    parser.add_argument("--caching", action="store_true", help="let torch keep freed memory under memcheck too")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "sanitize", help="folder of the outputs")
    parser.add_argument("--list", action="store_true", help="print the tests of each family")
    options = parser.parse_args()
    if options.list:
        for family in options.families:
            print(family, *(f"{pick.file}: {pick.tests}" for pick in FAMILIES[family]), sep="\n    ")
        return 0
    if shutil.which("compute-sanitizer") is None:
        sys.exit("sanitize: compute-sanitizer must be on PATH (a part of the CUDA toolkit), got none")
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    options.until = began + options.total
    built = run_step("", options.families, options)
    print(f"build: {time.monotonic() - began:.0f} s", flush=True)
    ready = [x for x in options.families if any(y.family == x and y.passed and not y.notes for y in built)]
    results = built + [x for tool in options.tools for x in run_step(tool, ready, options)]
    bad = [x for x in results if not x.is_good]
    print(f"{len(results) - len(bad)} of {len(results)} good, {sum(x.errors for x in results)} errors found by tools, "
          f"{time.monotonic() - began:.0f} s; outputs in {options.out}")  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
