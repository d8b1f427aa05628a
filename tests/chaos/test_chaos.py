# SPDX-License-Identifier: Apache-2.0
"""Cold starts on one cache while builders are killed, disks fill and caches are damaged (tests/chaos/run.py)."""

from __future__ import annotations

import pytest

from .faults import BEFORE, DURING, KILL
from .run import run


def test_every_fault_once():
    faults = [KILL, *BEFORE, *DURING]
    report = run(faults=faults)
    assert not report.failures, str(report)
    assert report.faults.total() == len(faults) and report.starts >= 5 * len(faults)


@pytest.mark.full
def test_the_whole():
    report = run(starts=600)
    assert not report.failures, str(report)
    assert report.starts >= 200 and report.faults.total() >= 100
