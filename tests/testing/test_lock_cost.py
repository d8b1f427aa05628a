# SPDX-License-Identifier: Apache-2.0
"""Measurement of what a wrapper's lock adds to a call (benchmarks/lock_cost.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "lock_cost.py"


def test_every_part_is_measured(monkeypatch):
    spec = importlib.util.spec_from_file_location("lock_cost", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CALLS", 2)
    times = module.measure("cpu", 2)
    assert list(times) == ["locked", "bare", "empty locked", "empty bare"]
    assert all(x > 0 for x in times.values())
