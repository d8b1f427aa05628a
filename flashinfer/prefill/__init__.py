# SPDX-License-Identifier: Apache-2.0
"""Prefill and append attention: many query tokens of each request over its keys."""

from ..attention.modules import get_batch_prefill_jit_module as get_batch_prefill_jit_module
from ..attention.modules import get_batch_prefill_module as get_batch_prefill_module
from ..attention.modules import get_customize_batch_prefill_module as get_customize_batch_prefill_module
from ..attention.modules import get_single_prefill_module as get_single_prefill_module
from ..attention.modules import make_hashable_cache as make_hashable_cache
from .paged import BatchPrefillWithPagedKVCacheWrapper
from .ragged import BatchPrefillWithRaggedKVCacheWrapper
from .single import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse
from .single import single_prefill_with_kv_cache_with_jit_module as single_prefill_with_kv_cache_with_jit_module

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
