# SPDX-License-Identifier: Apache-2.0
"""Cascade attention: attention over parts of the keys, merged into attention over all keys."""

from ..jit.cascade import gen_cascade_module as gen_cascade_module
from .merge import get_cascade_module as get_cascade_module
from .merge import merge_state, merge_state_in_place, merge_states, variable_length_merge_states
from .multi_level import MultiLevelCascadeAttentionWrapper
from .shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "variable_length_merge_states",
]
