# SPDX-License-Identifier: Apache-2.0
"""Calls of merged attention states for test_drawn_calls.py."""

from __future__ import annotations

from typing import Any

import flashinfer

from ..traced_calls import traced

_STATES = {"seq_len": (0, 1, 7), "num_heads": (1, 3), "head_dim": (8, 13, 64, 128)}
_SCORES: dict[str, Any] = {"any_strides": ("s", "s_a", "s_b", "s_other")}

CALLS = {
    "merge_state": traced(flashinfer.merge_state, **_SCORES, **_STATES),
    "merge_state_in_place": traced(flashinfer.merge_state_in_place, **_SCORES, **_STATES),
    "merge_states": traced(flashinfer.merge_states, num_states=(1, 2, 5), **_SCORES, **_STATES),
    "variable_length_merge_states": traced(flashinfer.cascade.variable_length_merge_states, **_SCORES, **_STATES),
}
