# SPDX-License-Identifier: Apache-2.0
"""Variant classes in the published form for SM90: constructor, updater, parameters."""

from __future__ import annotations

#: Without softmax. A number of each head is read where the tile is known.
GATED = """
struct Gated : AttentionVariantBase {
  float gate, factor;

  template <typename MainloopParams, typename BlockCoord>
  __device__ __host__ Gated(const MainloopParams& params, const BlockCoord& block_coord) {
    auto [q_tile_idx, qo_head_idx, kv_head_idx, qo_indptr, kv_indptr, qo_len, kv_len, batch_idx] = block_coord;
    gate = params.additional_params.gate[qo_head_idx];
    factor = params.additional_params.factor;
  }

  template <int NUM_ROWS_PER_THREAD>
  __device__ auto GetAttentionUpdater() {
    return DefaultUpdater<NUM_ROWS_PER_THREAD>();
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return factor * logits + gate;
  });
};
"""
GATED_PARAMETERS = (["gate"], ["float"], ["factor"], ["double"])

#: With softmax, a scale of each head, one of the values of each KV head, and a mask.
SCALED = """
struct Scaled : AttentionVariantBase {
  float sm_scale_log2, scale_pv;

  template <typename MainloopParams, typename BlockCoord>
  __device__ __host__ Scaled(const MainloopParams& params, const BlockCoord& block_coord) {
    auto [q_tile_idx, qo_head_idx, kv_head_idx, qo_indptr, kv_indptr, qo_len, kv_len, batch_idx] = block_coord;
    sm_scale_log2 = params.additional_params.scales[qo_head_idx] * math::log2e;
    scale_pv = get_v_scale(params.additional_params, kv_head_idx);
  }

  template <int NUM_ROWS_PER_THREAD>
  __device__ auto GetAttentionUpdater() {
    return OnlineSoftmax<NUM_ROWS_PER_THREAD, /*WITH_SCALE=*/true>(sm_scale_log2);
  }

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return kv_idx % params.additional_params.stride != 0;
  })
};
"""
SCALED_PARAMETERS = (["scales", "maybe_scale_v"], ["float", "float"], ["stride"], ["int64_t"])
