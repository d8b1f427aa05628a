# SPDX-License-Identifier: Apache-2.0
"""The pictures in docs/ are those that the scripts draw."""

import subprocess
import sys

import pytest

from .documents import ROOT


@pytest.mark.parametrize("name", ["draw_kernels.py", "draw_performance.py"])
def test_pictures_are_current(name):
    script = ROOT / "scripts" / name
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_measured_family_is_in_a_chart():
    """A case that is added to the results appears in a chart, which a page of docs/performance shows."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import draw_performance as draw
    finally:
        sys.path.pop(0)
    record = draw.read()
    results = draw.latest(record)
    drawn: set[str] = set()
    for name, (_, groups) in draw.CHARTS.items():
        page = ROOT / "docs" / "performance" / f"{name}.md"
        assert f"]({name}.svg)" in page.read_text()
        for group in groups(record):
            drawn |= {group.prefix + case.name for case in draw.cases_of(group, results)}
    missing = [case for case in results if case not in drawn and not case.startswith("plan/")]
    assert missing == [], "plan/ is time of the host: host_overhead.md"
