# SPDX-License-Identifier: Apache-2.0
"""Cold starts on one cache while builders are killed, disks fill and caches are damaged (tests/chaos/run.py)."""

from __future__ import annotations

import pytest

from .faults import KILL
from .run import run


def test_some_faults():
    """Play three kinds of faults once: one in the cache, one in a process, and a killed builder."""
    report = run(faults=["cache of another CPU", "full disk", KILL])
    assert not report.failures, str(report)
    assert report.faults.total() == 3 and report.starts == 3 * 4 + 4


@pytest.mark.full
def test_two_minutes_of_faults():
    report = run(starts=10**6, seconds=120)
    assert not report.failures, str(report)
    assert report.faults.total() >= 20
