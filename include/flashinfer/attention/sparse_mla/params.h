// SPDX-License-Identifier: Apache-2.0
// Sparse MLA: each query token attends to the rows of a latent cache that its list of indices names. Parameters and the
// entry that all backends share.
//   out[t][h] = sum_j softmax_j(sm_scale * (q[t][h] . k_j)) v_j,  j over indices[t][0 .. lengths[t]) without -1
//   k_j is row indices[t][j] of the cache, v_j its first 512 columns. A sink is one more logit of each head without a value.
// Rows of the cache, by their dtype:
//   that of q       512 or 576 columns
//   e4m3            512 or 576 columns; all values times kv_scale
//   bytes           656: 512 e4m3, four fp32 scales (of 128 columns each), 64 bf16 columns
// Defined in kernel.cuh (CUDA, SM80 and later) and cpu.h.
//   test  pytest tests/mla/test_sparse_mla.py      bench  python benchmarks/bench_sparse_mla.py
#pragma once
#include "../../backend.h"
#include "../../host_device.h"

namespace flashinfer {

struct SparseMlaParams {
  const void* q;                                   ///< (tokens, heads, 512 or 576)
  const void* kv;                                  ///< (pages, page_size, columns or bytes)
  const int32_t* indices;                          ///< (tokens, top_k): page * page_size + slot; -1: no key
  const int32_t* lengths;                          ///< (tokens): indices of each token; null: top_k
  const float* sinks;                              ///< (heads); null: none
  void* out;                                       ///< (tokens, heads, 512), contiguous
  float* lse;                                      ///< (tokens, heads), contiguous; null: not wanted
  float* partial_o;                                ///< (splits, tokens, heads, 512) if splits > 1
  float* partial_lse;                              ///< (splits, tokens, heads) if splits > 1
  int64_t q_stride_n, q_stride_h, indices_stride;  ///< elements
  int64_t kv_stride_page, kv_stride_slot;          ///< bytes
  int64_t rows;                                    ///< rows of the cache: pages * page_size
  FastDivisor page_size;
  int32_t tokens, heads, top_k, splits;
  float scale_log2;  ///< factor of the logits, log2(e) and the scale of the cache included
  float out_scale;   ///< scale of the cache
  float lse_scale;   ///< factor of the base-2 LSE: 1, or ln(2) for natural logarithms
  bool enable_pdl;
};

namespace sparse_mla {

constexpr int D_V = 512;            ///< columns of a value
constexpr int D_ROPE = 64;          ///< rotary columns of a key, behind those of the value
constexpr int SCALE_COLUMNS = 128;  ///< columns of a scale in packed rows
constexpr int PACKED_BYTES = D_V + D_V / SCALE_COLUMNS * 4 + D_ROPE * 2;
static_assert(PACKED_BYTES == 656, "published row");

/// Form of the rows of a cache.
enum class Cache { kLikeQuery, kE4m3, kPacked };

/// Return the indices of a token that count.
FLASHINFER_HD int LengthOf(const SparseMlaParams& p, int token) {
  if (p.lengths == nullptr) return p.top_k;
  const int length = p.lengths[token];
  return length < p.top_k ? (length > 0 ? length : 0) : p.top_k;
}

}  // namespace sparse_mla

/// Compute with queries of T; HAS_ROPE: rows of 576 columns, which packed rows have.
template <typename T, sparse_mla::Cache CACHE, bool HAS_ROPE>
Status SparseMla(const SparseMlaParams& params, Stream stream);

}  // namespace flashinfer
