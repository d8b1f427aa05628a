# SPDX-License-Identifier: Apache-2.0
"""Fixture: a new tuner for each test."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashinfer.autotuner import AutoTuner, set_autotune_process_group
from flashinfer.testing import timers

from .sleeper import calls, clock


@pytest.fixture(autouse=True)
def tuner(monkeypatch):
    tuner = AutoTuner(warmup=1, repeat=3)
    monkeypatch.setattr(AutoTuner, "_instance", tuner)
    monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))
    calls.clear()
    yield tuner
    set_autotune_process_group(None)
