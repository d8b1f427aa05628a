# SPDX-License-Identifier: Apache-2.0
"""The merges of attention states under the path of their published Triton twins: one implementation serves both."""

from ..cascade.merge import merge_state, merge_state_in_place, merge_states, variable_length_merge_states

__all__ = ["merge_state", "merge_state_in_place", "merge_states", "variable_length_merge_states"]
