# SPDX-License-Identifier: Apache-2.0
"""Drawn calls of each family, whose tensors lie beside unreadable pages, and whose arguments are changed."""

from __future__ import annotations

import pytest

from .guard_pages import check_calls

#: Families and their share of all drawn calls (``FLASHINFER_TEST_CALLS``); the rest is in tests/fused_moe.
SHARES = {
    "activation": 0.03,
    "attention": 0.15,
    "cascade": 0.04,
    "concat_ops": 0.01,
    "gemm": 0.12,
    "indexer": 0.02,
    "mla": 0.04,
    "norm": 0.08,
    "page": 0.07,
    "quantization": 0.06,
    "recurrent": 0.06,
    "rope": 0.08,
    "sampling": 0.08,
    "topk": 0.04,
}


@pytest.mark.parametrize("family", SHARES)
def test_calls_reach_nothing_but_their_tensors(family):
    check_calls(f"tests.{family}.drawn_calls", SHARES[family])
