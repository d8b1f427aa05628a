# SPDX-License-Identifier: Apache-2.0
"""A variant class in C++ without softmax."""

from __future__ import annotations

#: The smallest variant without softmax: no lengths, no scale.
SIGMOID = """
struct Sigmoid : AttentionVariantBase {
  static constexpr bool use_softmax = false;
  template <typename Params>
  __device__ __host__ Sigmoid(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {}

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return math::ptx_rcp(1.f + math::ptx_exp2(-float(logits * params.factor + params.bias) * math::log2e));
  });
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, { return output; })
};
"""
