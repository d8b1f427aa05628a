// SPDX-License-Identifier: Apache-2.0
// Exports of the rope module.
#include "tvm_ffi_utils.h"

void apply_rope(TensorView q, TensorView k, Optional<TensorView> q_rope, Optional<TensorView> k_rope, TensorView indptr,
                TensorView offsets, Optional<int64_t> rotary_dim, bool interleave, double rope_scale,
                double rope_theta);
void apply_rope_pos_ids(TensorView q, TensorView k, Optional<TensorView> q_rope, Optional<TensorView> k_rope,
                        TensorView pos_ids, Optional<int64_t> rotary_dim, bool interleave, double rope_scale,
                        double rope_theta);
void apply_llama31_rope(TensorView q, TensorView k, Optional<TensorView> q_rope, Optional<TensorView> k_rope,
                        TensorView indptr, TensorView offsets, Optional<int64_t> rotary_dim, bool interleave,
                        double rope_scale, double rope_theta, double low_freq_factor, double high_freq_factor,
                        double old_context_len);
void apply_llama31_rope_pos_ids(TensorView q, TensorView k, Optional<TensorView> q_rope, Optional<TensorView> k_rope,
                                TensorView pos_ids, Optional<int64_t> rotary_dim, bool interleave, double rope_scale,
                                double rope_theta, double low_freq_factor, double high_freq_factor,
                                double old_context_len);
void apply_rope_pos_ids_cos_sin_cache(TensorView query, TensorView key, Optional<TensorView> query_out,
                                      Optional<TensorView> key_out, int64_t head_size, TensorView cos_sin_cache,
                                      TensorView positions, bool interleave);
void rope_quantize(TensorView q_rope, TensorView k_rope, Optional<TensorView> q_nope, Optional<TensorView> k_nope,
                   TensorView q_rope_out, TensorView k_rope_out, TensorView q_nope_out, TensorView k_nope_out,
                   TensorView cos_sin_cache, TensorView pos_ids, double quant_scale_q, double quant_scale_kv,
                   bool interleave, bool enable_pdl);
void rope_quantize_append_paged_kv_cache(TensorView q_rope, TensorView k_rope, Optional<TensorView> q_nope,
                                         Optional<TensorView> k_nope, Optional<TensorView> v, TensorView q_rope_out,
                                         TensorView q_nope_out, TensorView first_cache, TensorView second_cache,
                                         TensorView cos_sin_cache, TensorView pos_ids, TensorView kv_indices,
                                         TensorView kv_indptr, TensorView batch_indices, TensorView positions,
                                         int64_t page_size, bool heads_first, double quant_scale_q,
                                         double quant_scale_kv, bool interleave, bool enable_pdl, bool validate);

FLASHINFER_EXPORT(apply_rope, apply_rope)
FLASHINFER_EXPORT(apply_rope_pos_ids, apply_rope_pos_ids)
FLASHINFER_EXPORT(apply_llama31_rope, apply_llama31_rope)
FLASHINFER_EXPORT(apply_llama31_rope_pos_ids, apply_llama31_rope_pos_ids)
FLASHINFER_EXPORT(apply_rope_pos_ids_cos_sin_cache, apply_rope_pos_ids_cos_sin_cache)
FLASHINFER_EXPORT(rope_quantize, rope_quantize)
FLASHINFER_EXPORT(rope_quantize_append_paged_kv_cache, rope_quantize_append_paged_kv_cache)
