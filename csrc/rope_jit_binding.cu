// SPDX-License-Identifier: Apache-2.0
// Exports of the rope module.
#include "rope.cu"

FLASHINFER_EXPORT(apply_rope, apply_rope)
FLASHINFER_EXPORT(apply_rope_pos_ids, apply_rope_pos_ids)
FLASHINFER_EXPORT(apply_llama31_rope, apply_llama31_rope)
FLASHINFER_EXPORT(apply_llama31_rope_pos_ids, apply_llama31_rope_pos_ids)
FLASHINFER_EXPORT(apply_rope_pos_ids_cos_sin_cache, apply_rope_pos_ids_cos_sin_cache)
FLASHINFER_EXPORT(rope_quantize, rope_quantize)
FLASHINFER_EXPORT(rope_quantize_append_paged_kv_cache, rope_quantize_append_paged_kv_cache)
