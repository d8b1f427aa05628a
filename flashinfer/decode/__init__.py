# SPDX-License-Identifier: Apache-2.0
"""Decode attention: one query token (or a few) of each request over all its keys."""

from typing import Any

from .._compat.unsupported_attention import DECODE_NAMES as _DECODE
from .._compat.unsupported_attention import MLA_NAMES as _MLA
from ..attention.index_arrays import range_buffer as _get_range_buf  # noqa: F401, older releases of SGLang import it
from ..attention.modules import get_batch_decode_jit_module as get_batch_decode_jit_module
from ..attention.modules import get_batch_decode_mla_module as get_batch_decode_mla_module
from ..attention.modules import get_batch_decode_module as get_batch_decode_module
from ..attention.modules import get_single_decode_module as get_single_decode_module
from ..cudnn import cudnn_batch_decode_with_kv_cache as cudnn_batch_decode_with_kv_cache
from ..jit.attention import gen_batch_decode_module as gen_batch_decode_module
from ..jit.attention import gen_single_decode_module as gen_single_decode_module
from ..mla import BatchDecodeMlaWithPagedKVCacheWrapper as BatchDecodeMlaWithPagedKVCacheWrapper
from ..page import get_seq_lens as get_seq_lens
from .batch import BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper
from .fast_plan import fast_decode_plan as fast_decode_plan
from .single import single_decode_with_kv_cache
from .single import single_decode_with_kv_cache_with_jit_module as single_decode_with_kv_cache_with_jit_module
from .trtllm import trtllm_batch_decode_with_kv_cache as trtllm_batch_decode_with_kv_cache
from .trtllm import xqa_batch_decode_with_kv_cache as xqa_batch_decode_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "single_decode_with_kv_cache",
]

_BLACKWELL = _DECODE | _MLA  # published releases export the MLA names here too


def __getattr__(name: str) -> Any:
    if name in _BLACKWELL:
        return _BLACKWELL[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
