# SPDX-License-Identifier: Apache-2.0
"""CHANGELOG.md: one line, one fact."""

from __future__ import annotations

from .documents import ROOT

LINES = (ROOT / "CHANGELOG.md").read_text().splitlines()
HEADINGS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def test_lines_are_short():
    assert [line for line in LINES if len(line) > 120] == []


def test_each_entry_is_one_line():
    """Check that below the first release there are headings and entries, which end in a full stop, and nothing else."""
    first = next(i for i, line in enumerate(LINES) if line.startswith("## "))
    wrong = [
        line
        for line in LINES[first:]
        if line and not line.startswith(("## [", *(f"### {name}" for name in HEADINGS)))
        if not (line.startswith("- ") and line.endswith("."))
    ]
    assert wrong == [], "an entry is one line of at most 120 characters: split it, or link to the page that says more"


def test_no_fact_is_told_twice():
    entries = [line for line in LINES if line.startswith("- ")]
    assert len(entries) == len(set(entries)) > 50
