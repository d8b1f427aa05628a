# SPDX-License-Identifier: Apache-2.0
"""Experts, adapters, routing, order and copies of rows: no call touches memory beside its tensors, or fails unnamed."""

from __future__ import annotations

from ..guard_pages import check_calls


def test_calls_beside_unreadable_pages():
    counts = check_calls("tests.fused_moe.drawn_calls", share=0.3)
    assert all(refused for name, (_, refused) in counts.items() if name in ("bgmv_moe", "gemm2", "route", "permute"))
