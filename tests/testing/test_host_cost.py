# SPDX-License-Identifier: Apache-2.0
"""Measurement of the host time of calls (benchmarks/host_cost.py)."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "host_cost.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("host_cost", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_time_of_a_call(script):
    low, median = script.measure(lambda: time.sleep(0.002), 30, "cpu")
    assert 2000 <= low <= median


@pytest.mark.parametrize("family", ["dense", "grouped", "moe"])
def test_calls_run(script, family, device):
    calls = script.FAMILIES[family](device)
    assert len(calls) >= 3
    for call in calls.values():
        call()
