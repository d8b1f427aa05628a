# SPDX-License-Identifier: Apache-2.0
"""Paged KV caches: appending keys and values, as they are or quantised, and the indices of a batch that does."""

from ..jit.page import gen_page_module as gen_page_module
from .append import append_paged_kv_cache, append_paged_mla_kv_cache
from .indices import get_batch_indices_positions, get_seq_lens
from .modules import get_page_module as get_page_module
from .nvfp4 import nvfp4_quantize_append_paged_kv_cache, nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
from .nvfp4_mla import nvfp4_quantize_append_paged_mla_kv_cache

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "nvfp4_quantize_append_paged_mla_kv_cache",
]
