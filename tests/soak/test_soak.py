# SPDX-License-Identifier: Apache-2.0
"""A few rounds of the soak (run.py), and that it sees a wrong row."""

from __future__ import annotations

import torch

import flashinfer

from ..fused_moe import layers
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


def test_slots_with_one_expert_move_together():
    """The limit of a result is that of one slot with the sum of the scales: all slots have the same hidden codes."""
    call = layers.fp8_block(5, 64, 64, 4, 3, device="cpu")
    call["token_selected_experts"][:] = torch.tensor([2, 1, 2])
    scales = call["token_final_scales"]
    merged = {**call, "token_selected_experts": torch.tensor([[2, 1]] * 5, dtype=torch.int32)}
    merged["token_final_scales"] = torch.stack((scales[:, 0] + scales[:, 2], scales[:, 1]), dim=1)
    torch.testing.assert_close(layers.spread_of_codes(call), layers.spread_of_codes(merged))
