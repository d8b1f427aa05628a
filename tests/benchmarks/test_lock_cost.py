# SPDX-License-Identifier: Apache-2.0
"""Measurement of what a wrapper's lock adds to a call (benchmarks/lock_cost.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "lock_cost.py"


def script():
    spec = importlib.util.spec_from_file_location("lock_cost", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_part_is_measured(monkeypatch):
    module = script()
    monkeypatch.setattr(module, "CALLS", 2)
    times = module.measure("cpu", 2)
    kinds = ("", "empty ", "method ")
    assert list(times) == [f"{kind}{name}" for kind in kinds for name in ("locked", "bare")]
    assert all(x > 0 for x in times.values())


def test_bare_calls_take_no_lock():
    module = script()
    used = {locks: module.repeat_of(locks, True).__code__.co_names for locks in (False, True)}
    assert not {"_lock", "free", "pop", "stream"} & set(used[False])
    assert {"_lock", "free", "pop", "stream"} <= set(used[True])
    assert set(used[False]) <= set(used[True]) and "rerun" in used[False]
