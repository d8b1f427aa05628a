// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding: parameters and entry, shared by both backends.
//   first'  = first * cos - second * sin
//   second' = second * cos + first * sin       angle = position * frequency[j], j the index of the pair
// Pairs are (j, j + R/2), or (2j, 2j + 1) when interleaved. A call is a list of segments: tensors whose heads are rotated
// or copied, read once and written once, optionally scaled to fp8 and scattered into the pages of a KV cache.
// Defined in rope.cuh (CUDA) and rope_cpu.h (CPU). Frequencies are fp64 and angles are reduced to a turn before they
// become fp32, so a position of a million is as exact as one of ten; the rotation is fp32 with one rounding.
//   test  pytest tests/rope      bench  python benchmarks/bench_rope.py
#pragma once
#include "backend.h"
#include "page.h"

namespace flashinfer {

/// Storage of the results; the fp8 kinds saturate and round to nearest even.
enum class RopeOut : int { kSame, kE4M3, kE5M2 };

/// One tensor (tokens, heads, width). Strides are in elements.
struct RopeSegment {
  const void* in;
  void* out;  ///< may be `in`, with its strides: then columns that are not rotated are left alone
  int64_t heads;
  int64_t width;
  bool rotated;  ///< the first rotary_dim columns; the others are copied
  bool paged;    ///< out rows are cache slots: page * out_row + entry * out_entry, instead of token * out_row
  int64_t in_token, in_head;
  int64_t out_row, out_entry, out_head;
  float scale;  ///< fp8 kinds only

  bool InPlace() const { return in == out && in_token == out_row && in_head == out_head; }
};

/// Position of a token: pos_ids[token], or offsets[b] + (token - indptr[b]) for the request b that holds the token.
struct RopePositions {
  const void* pos_ids;  ///< null: ragged
  const void* indptr;   ///< tokens outside of [indptr[0], indptr[requests]) are left alone
  const void* offsets;
  int64_t requests;
  bool wide;  ///< int64 rather than int32
};

/// Angle of a pair: a row of a table, or position * f with
///   f = 2^(-j * log2_step), then f <- f * ((1 - s) * inv_scale + s), s = clamp(ramp * f + shift, 0, 1)
/// (ramp = shift = 0 is plain interpolation, otherwise Llama 3.1's).
struct RopeAngles {
  const float* cache;  ///< null, or rows of R/2 cosines and R/2 sines
  int64_t cache_stride, cache_rows;
  double log2_step, inv_scale, ramp, shift;
};

struct RopeParams {
  static constexpr int MAX_SEGMENTS = 5;
  RopeSegment segments[MAX_SEGMENTS];  ///< rotated ones first
  int num_segments;
  int64_t tokens;
  int64_t rotary_dim;
  bool interleave;
  RopePositions positions;
  RopeAngles angles;
  PageTable pages;  ///< batch_indices null: no cache. For a token without a slot, such as padding, nothing is written
  RopeOut out_kind;
  bool enable_pdl;  ///< CUDA only: programmatic dependent launch
};

#ifdef FLASHINFER_CPU
template <typename T>
Status Rope(const RopeParams& params, Stream stream);
#else
/// Largest rotary_dim: the cosines and sines of a token are kept in shared memory.
constexpr int64_t MAX_ROTARY_DIM = 1024;

/// Rope with or without conversion to fp8. Defined in rope.cuh; the launcher needs the declaration only.
template <typename T, bool QUANT>
Status RopeOf(const RopeParams& params, Stream stream);

template <typename T>
Status Rope(const RopeParams& p, Stream stream) {
  return p.out_kind == RopeOut::kSame ? RopeOf<T, false>(p, stream) : RopeOf<T, true>(p, stream);
}
#endif

}  // namespace flashinfer
