# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: of queries and keys, alone or fused with fp8 quantisation and the append to a KV cache."""

from ..jit.rope import gen_rope_module as gen_rope_module
from .cos_sin_cache import apply_rope_with_cos_sin_cache, apply_rope_with_cos_sin_cache_inplace
from .llama31 import (
    apply_llama31_rope,
    apply_llama31_rope_inplace,
    apply_llama31_rope_pos_ids,
    apply_llama31_rope_pos_ids_inplace,
)
from .modules import get_rope_module as get_rope_module
from .plain import apply_rope, apply_rope_inplace, apply_rope_pos_ids, apply_rope_pos_ids_inplace
from .quantize import mla_rope_quantize_fp8, rope_quantize_fp8
from .quantize_append import rope_quantize_fp8_append_paged_kv_cache

__all__ = [
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "mla_rope_quantize_fp8",
    "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
]
