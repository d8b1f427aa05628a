# SPDX-License-Identifier: Apache-2.0
"""The pictures in docs/, and the figures in README.md, are those that the scripts draw and write."""

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


def test_the_readme_tells_what_the_chart_shows(tmp_path, monkeypatch):
    """A README with another figure is refused, and the chart of the family has the figure too."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import draw_performance as draw
    finally:
        sys.path.pop(0)
    record = draw.read()
    result = draw.latest(record)[draw.TOLD]
    told = f"**{result['tflops']:.0f} TFLOP/s**"
    readme = (ROOT / "README.md").read_text()
    assert readme.count(told) == 1 and readme == draw.figures()
    assert f">{draw.short(result['tflops'])}<" in (ROOT / "docs" / "performance" / "attention.svg").read_text()
    monkeypatch.setattr(draw, "ROOT", tmp_path)
    monkeypatch.setattr(draw, "read", lambda: record)
    (tmp_path / "README.md").write_text(readme.replace(told, "**733 TFLOP/s**"))
    assert draw.figures() == readme
