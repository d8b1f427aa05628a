# SPDX-License-Identifier: Apache-2.0
"""Prefill and append attention: many query tokens of each request over its keys."""

from typing import Any

from .._compat.unsupported_attention import PREFILL_NAMES as _BLACKWELL
from ..attention.modules import get_batch_prefill_jit_module as get_batch_prefill_jit_module
from ..attention.modules import get_batch_prefill_module as get_batch_prefill_module
from ..attention.modules import get_customize_batch_prefill_module as get_customize_batch_prefill_module
from ..attention.modules import get_single_prefill_module as get_single_prefill_module
from ..attention.modules import make_hashable_cache as make_hashable_cache
from ..cudnn import cudnn_batch_prefill_with_kv_cache as cudnn_batch_prefill_with_kv_cache
from ..jit.attention import gen_batch_prefill_module as gen_batch_prefill_module
from ..jit.attention import gen_single_prefill_module as gen_single_prefill_module
from .paged import BatchPrefillWithPagedKVCacheWrapper
from .ragged import BatchPrefillWithRaggedKVCacheWrapper
from .ranges import BatchPrefillWithCausalBidirectionalRangesWrapper
from .single import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse
from .single import single_prefill_with_kv_cache_with_jit_module as single_prefill_with_kv_cache_with_jit_module
from .trtllm import get_trtllm_fmha_v2_module as get_trtllm_fmha_v2_module
from .trtllm import trtllm_fmha_v2_prefill as trtllm_fmha_v2_prefill

__all__ = [
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


def __getattr__(name: str) -> Any:
    if name in _BLACKWELL:
        return _BLACKWELL[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
