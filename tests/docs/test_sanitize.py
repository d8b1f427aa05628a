# SPDX-License-Identifier: Apache-2.0
"""The sanitizer check: its table names tests that exist, and its verdict follows what the tools print."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from flashinfer.aot import FAMILIES as BUILT

from ..fresh_process import run_python

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
try:
    import sanitize
    from sanitized_tests import Pick
finally:
    sys.path.pop(0)

#: Collects as on a machine with a Hopper GPU, and writes the choice of each family.
COLLECT = """
import json, torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda *args: (9, 0)
import pytest, sanitized_tests as sanitize

class Choice:
    def pytest_collection_finish(self, session):
        sizes = {
            name: [[pick.file, pick.tests, pick.ids, len(sanitize.chosen(session.items, [pick]))] for pick in picks]
            for name, picks in sanitize.FAMILIES.items()
        }
        open("OUT", "w").write(json.dumps(sizes))

files = sorted({f"tests/{pick.file}" for picks in sanitize.FAMILIES.values() for pick in picks})
pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", *files], plugins=[Choice()])
"""


def test_every_pick_has_tests(tmp_path):
    """Each entry of the table selects as many tests as it names, or more, on a machine with the GPU."""
    out = tmp_path / "sizes.json"
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"}
    program = COLLECT.replace("OUT", str(out))
    run_python(["-c", program], env=env, cwd=ROOT, check=True)
    sizes = json.loads(out.read_text())
    few = [(name, pick) for name, picks in sizes.items() for pick in picks if pick[3] < len(pick[1].split())]
    assert few == []


def test_every_family_is_checked():
    """Families of modules, by the folder of their tests. ``prefill`` and ``decode`` are tested in ``attention``."""
    files = {pick.file for picks in sanitize.FAMILIES.values() for pick in picks}
    folders = {file.split("/")[0].removeprefix("test_").removesuffix(".py") for file in files}
    assert set(BUILT) - {"prefill", "decode"} <= folders and "attention" in folders


def test_kernels_are_found_by_their_namespace():
    """The tools look at kernels whose mangled name contains ``flashinfer``."""
    for path in (ROOT / "include").rglob("*.cuh"):
        text = path.read_text()
        if re.search(r"^__global__|^\s+__global__", text, re.MULTILINE):
            assert re.search(r"^namespace flashinfer\b", text, re.MULTILINE), path


TAIL = "..s\n5 passed, 1 skipped in 3.20s\n"
RACES = "========= RACECHECK SUMMARY: {} hazards displayed ({})\n"


@pytest.mark.parametrize(
    "tool, text, counts, is_good",
    [
        ("memcheck", TAIL + "========= ERROR SUMMARY: 0 errors\n", (5, 1, 0, 0), True),
        ("memcheck", TAIL + "========= ERROR SUMMARY: 12 errors\n", (5, 1, 0, 12), False),
        ("racecheck", TAIL + RACES.format(0, "0 errors, 0 warnings"), (5, 1, 0, 0), True),
        ("racecheck", TAIL + RACES.format(2, "1 error, 1 warning"), (5, 1, 0, 2), False),
        ("memcheck", TAIL, (5, 1, 0, 0), False),
        ("", TAIL, (5, 1, 0, 0), True),
        ("", "1 failed, 4 passed, 1 error in 2.00s\n", (4, 0, 2, 0), False),
        ("", "3 skipped in 2.00s\n", (0, 3, 0, 0), False),
    ],
)  # fmt: skip
def test_verdicts(tool, text, counts, is_good):
    result = sanitize.Result("norm")
    sanitize.read(result, text, tool)
    assert (result.passed, result.skipped, result.failed, result.errors) == counts
    assert result.is_good is is_good


ERRORS = 3
TOOL = f"""#!/bin/bash
while [ "$1" != "{sys.executable}" ]; do shift; done
"$@"
echo "========= ERROR SUMMARY: {ERRORS} errors"
exit 9
"""


@pytest.fixture
def main(tmp_path, monkeypatch):
    """Return the command for one family and tool, with a stand-in for the tool."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "argv", ["sanitize", "--families", "scale", "--tools", "memcheck", "--out", str(tmp_path)])
    return sanitize.main


def test_a_tool_that_reports_errors(main, monkeypatch, capsys):
    """Run a test that needs no GPU under the tool."""
    monkeypatch.setitem(sanitize.FAMILIES, "scale", [Pick("test_scale.py", "test_module_name", 2)])
    assert main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"ok   build     scale +2 passed, 0 errors", lines[0])
    assert re.match(rf"FAIL memcheck  scale +2 passed, {ERRORS} errors", lines[2])


def test_a_tool_that_reports_none(main, monkeypatch, capsys):
    """Check the exit status and the lines; the processes are replaced by their result."""
    monkeypatch.setattr(sanitize, "check", lambda tool, family, options: sanitize.Result(family, passed=2))
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"ok   build     scale +2 passed, 0 errors", lines[0])
    assert re.match(r"ok   memcheck  scale +2 passed, 0 errors", lines[2])


def test_a_process_that_takes_too_long_is_stopped(tmp_path):
    options = argparse.Namespace(seconds=5, build_seconds=0.05, out=tmp_path, caching=False)
    begin = time.monotonic()
    result = sanitize.check("", "scale", options)
    assert time.monotonic() - begin < 5 and result.notes == ["stopped after 0 s"] and not result.is_good
