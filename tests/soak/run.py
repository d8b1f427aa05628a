# SPDX-License-Identifier: Apache-2.0
"""Random calls for minutes: every result is compared with a reference, and no call may hang.

python -m tests.soak.run --seconds 600 --device cuda --report soak.md

A round draws a family, a batch and the options of a call from the seed of the round, runs it twice (the second result
must have the same bits) and compares all rows. A round that fails is named by its seed; ``--seed N --rounds 1`` repeats
it.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Sequence

import torch

from .rounds import ROUNDS

HANG_S = 120  # the longest round, builds of its modules included, takes less


@dataclass
class Report:
    """Counts of a run."""

    device: str
    seconds: float = 0.0
    rounds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [f"| {name} | {count} |" for name, count in sorted(self.rounds.items())]
        head = f"{self.rounds.total()} rounds on {self.device} in {self.seconds:.0f} s, {len(self.failures)} failures"
        return "\n".join([head, "", "| family | rounds |", "|---|---|", *rows, "", *self.failures])


def run(device: str, families: Sequence[str], seed: int = 0, rounds: int = 10**9, seconds: float = 1e9) -> Report:
    """Run rounds until one of the limits is reached. A round that hangs ends the process with a trace."""
    report, start = Report(device), time.monotonic()
    while report.rounds.total() < rounds and time.monotonic() - start < seconds:
        family = families[seed % len(families)]
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            torch.manual_seed(seed)
            ROUNDS[family](seed, device)
        except Exception:
            report.failures.append(f"seed {seed} ({family}):\n{traceback.format_exc()}")
        finally:
            faulthandler.cancel_dump_traceback_later()
        report.rounds[family] += 1
        seed += 1
    report.seconds = time.monotonic() - start
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--families", nargs="+", default=list(ROUNDS), choices=list(ROUNDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--report", type=Path)
    given = parser.parse_args()
    report = run(given.device, given.families, given.seed, given.rounds, given.seconds)
    print(report)
    if given.report:
        given.report.write_text(f"{report}\n")
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
