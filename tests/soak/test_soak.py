# SPDX-License-Identifier: Apache-2.0
"""A few rounds of the soak (run.py), and that it sees a wrong row."""

from __future__ import annotations

import flashinfer

from .rounds import ROUNDS
from .run import run


def test_a_few_rounds(device):
    report = run(device, list(ROUNDS), rounds=9)
    assert not report.failures, str(report)
    assert dict(report.rounds) == dict.fromkeys(ROUNDS, 3)


def test_a_wrong_row_is_seen(monkeypatch):
    real = flashinfer.BatchPrefillWithPagedKVCacheWrapper.run

    def wrong(self, *arguments, **options):
        out, lse = real(self, *arguments, **options)
        out[-1, -1, -1] += 1
        return out, lse

    monkeypatch.setattr(flashinfer.BatchPrefillWithPagedKVCacheWrapper, "run", wrong)
    report = run("cpu", ["prefill"], rounds=6)
    assert report.failures and "seed" in str(report)
