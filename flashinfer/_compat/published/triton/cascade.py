# SPDX-License-Identifier: Apache-2.0
"""Merges of attention states, under the module path of their published Triton versions."""

from flashinfer.cascade.merge import merge_state, merge_state_in_place, merge_states, variable_length_merge_states

__all__ = ["merge_state", "merge_state_in_place", "merge_states", "variable_length_merge_states"]
