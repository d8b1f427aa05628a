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


def rows(results: dict[str, str]) -> list[str]:
    """Return the lines of the Markdown table; ``results`` has a state by the name of a case's function."""
    lines = ["| engine | feature | called here | state |", "|---|---|---|---|"]
    for each in CASES:
        state = results.get(each.run.__name__, "not run")
        lines.append(f"| {each.engine} | {each.feature} | `{each.called}` | {state} |")
    return lines
