// SPDX-License-Identifier: Apache-2.0
// RMSNorm over all heads of q (and of k) of a packed qkv row, then 3-D rotary embedding; v is copied. CUDA only.
//   token t of a sequence: frame = t / (pph * ppw), height = t % (pph * ppw) / ppw, width = t % ppw
//   pair i of a head (0 <= i < D / 2) turns by pos(axis of channel 2i) * freq(i); elements (2i, 2i + 1) when
//   interleaved, (i, i + D / 2) otherwise.
//   freq(i) = base^(-2 j / n), j the pair's index inside its axis' block of n channels; YaRN blends it with freq / factor
//   test  pytest tests/norm/test_qk_rmsnorm_rope.py      bench  python benchmarks/bench_norm.py
#pragma once
#include "backend.h"

namespace flashinfer {

struct QkRMSNormRopeParams {
  const bfloat16_t* qkv;  ///< (num_tokens, (num_heads_q + num_heads_k + num_heads_v) * head_dim), contiguous
  const bfloat16_t* q_weight;
  const bfloat16_t* k_weight;
  void* q_out;  ///< (num_tokens, num_heads_q, head_dim), bfloat16 or e4m3
  void* k_out;
  void* v_out;
  int64_t num_tokens;
  int num_heads_q, num_heads_k, num_heads_v;
  int head_dim;
  int ppf, pph, ppw;
  int num_frame_channels, num_height_channels, num_width_channels;
  float eps;
  float log2_base;
  float factor, low, high, attention_factor;  ///< YaRN; factor 1 is plain
  float qk_scale, v_scale;                    ///< multiply the fp8 outputs
  bool interleave;
  bool is_qk_norm;
  bool output_fp8;
};

Status QkRMSNormRope(const QkRMSNormRopeParams& params, Stream stream);

}  // namespace flashinfer
