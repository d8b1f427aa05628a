# SPDX-License-Identifier: Apache-2.0
"""The CUPTI timer with a fake cupti-python: records in, spans out."""

import importlib.metadata
import itertools
import sys
import types

import pytest
import torch

from flashinfer.testing import cupti
from flashinfer.testing.timers import Plan


class FakeCupti(types.ModuleType):
    """Fake CUPTI: a clock that ticks in microseconds, and records that are delivered at the flush."""

    class ActivityKind:
        CONCURRENT_KERNEL, MEMCPY, MEMSET, OVERHEAD = "kernel", "memcpy", "memset", "overhead"

    def __init__(self):
        super().__init__("cupti.cupti")
        self.clock = itertools.count(step=1000)
        self.enabled, self.records = set(), []

    def get_timestamp(self):
        return next(self.clock)

    def activity_register_callbacks(self, requested, completed):
        assert len(requested()) == 2
        self.completed = completed

    def activity_enable(self, kind):
        self.enabled.add(kind)

    def activity_disable(self, kind):
        self.enabled.discard(kind)

    def activity_flush_all(self, flag):
        self.completed(self.records)
        self.records = []

    def run(self, name, kind="kernel"):
        """Record a kernel of 1 us."""
        begin, end = self.get_timestamp(), self.get_timestamp()
        if self.enabled:
            self.records.append(types.SimpleNamespace(name=name, kind=kind, start=begin, end=end))


@pytest.fixture
def fake(monkeypatch):
    module = FakeCupti()
    package = types.ModuleType("cupti")
    package.cupti = module
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setitem(sys.modules, "cupti.cupti", module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    return module


def test_time_spans_first_to_last_activity(fake):
    def call():
        fake.run("gather")
        fake.run("reduce")

    times = cupti.cupti_times(call, Plan(dry_run_iters=2, repeat_iters=4), flush=lambda: fake.run("fill"))
    assert times == [3e-3] * 4  # ms: two kernels of 1 us, 1 us apart; the flush is outside the windows
    assert not fake.enabled


def test_counts_are_estimated(fake):
    calls = []
    times = cupti.cupti_times(
        lambda: (calls.append(1), fake.run("k")), Plan(dry_run_time_ms=0.002, repeat_time_ms=0.007), None
    )
    assert len(times) == 7 and len(calls) == 1 + 5 + 2 + 7


def test_other_records_are_ignored(fake):
    def call():
        fake.run("k")
        fake.run("bookkeeping", kind="overhead")

    assert cupti.cupti_times(call, Plan(dry_run_iters=0, repeat_iters=1), None) == [1e-3]


def test_changing_work_is_an_error(fake):
    names = iter(["warm-up", "a", "b"])
    with pytest.raises(RuntimeError, match=r"must run \['a'\] .*, got \['b'\]"):
        cupti.cupti_times(lambda: fake.run(next(names)), Plan(dry_run_iters=0, repeat_iters=2), None)
    assert not fake.enabled  # collection is switched off


def test_no_activity_is_an_error(fake):
    with pytest.raises(RuntimeError, match="no GPU activity"):
        cupti.cupti_times(lambda: None, Plan(dry_run_iters=0, repeat_iters=1), None)


def test_problem_names_what_is_wrong(monkeypatch, fake):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert cupti.cupti_problem() == "cupti-python is not installed"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "12.8.0")
    assert cupti.cupti_problem() == "cupti-python must be 13 or later, got 12.8.0"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "13.0.1")
    assert cupti.cupti_problem() is None
    monkeypatch.setitem(sys.modules, "cupti", None)  # makes the import fail
    assert "does not load" in cupti.cupti_problem()
