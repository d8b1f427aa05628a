# SPDX-License-Identifier: Apache-2.0
"""Cases of the lane, and the table of their results in docs/engines.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

CASES: list[Case] = []


@dataclass(frozen=True)
class Case:
    """One feature of one engine; ``run`` raises if the engine cannot start it, or if values differ."""

    engine: str
    feature: str
    called: str
    run: Callable[[], None]


def case(engine: str, feature: str, called: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Decorator: list a function as the case of a feature."""

    def add(run: Callable[[], None]) -> Callable[[], None]:
        CASES.append(Case(engine, feature, called, run))
        return run

    return add


def states_of(lines: list[str]) -> dict[tuple[str, str], str]:
    """Return the state of each engine's feature in the lines of a table."""
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("|")]
    return {(cell[0], cell[1]): cell[3] for cell in cells if len(cell) == 4}


def rows(results: dict[str, str], before: list[str]) -> list[str]:
    """Return the lines of the Markdown table: states by the name of a case's function, else those of ``before``."""
    known = states_of(before)
    lines = ["| engine | feature | called here | state |", "|---|---|---|---|"]
    for each in sorted(CASES, key=lambda one: one.engine):
        state = results.get(each.run.__name__) or known.get((each.engine, each.feature), "not run")
        lines.append(f"| {each.engine} | {each.feature} | `{each.called}` | {state} |")
    return lines
