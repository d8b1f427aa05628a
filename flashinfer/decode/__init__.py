# SPDX-License-Identifier: Apache-2.0
"""Decode attention: one query token (or a few) of each request over all its keys."""

from ..attention.host import range_buffer as _get_range_buf  # noqa: F401, older releases of SGLang import it
from ..attention.modules import get_batch_decode_jit_module as get_batch_decode_jit_module
from ..attention.modules import get_batch_decode_module as get_batch_decode_module
from ..attention.modules import get_single_decode_module as get_single_decode_module
from .batch import BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper
from .fast_plan import fast_decode_plan as fast_decode_plan
from .single import single_decode_with_kv_cache
from .single import single_decode_with_kv_cache_with_jit_module as single_decode_with_kv_cache_with_jit_module

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "single_decode_with_kv_cache",
]
