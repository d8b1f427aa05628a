// SPDX-License-Identifier: Apache-2.0
// MLA decode on SM90: masks, maxima and weights of a 64 x 64 block of scores in the registers of a warpgroup.
//
// A thread has columns 8 j + 2 (lane % 4) + {0, 1} of two rows, lane / 4 + 8 h of its warp: s[4 j + 2 h + {0, 1}].
#pragma once
#include "../../ptx/math.cuh"
#include "shape.cuh"

namespace flashinfer {
namespace attention {
namespace mla {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Two values of a thread, one for each of its rows.
struct RowPair {
  float x[2];
  __device__ __forceinline__ float operator[](int h) const { return x[h]; }
  __device__ __forceinline__ float& operator[](int h) { return x[h]; }
};

/// First row of this thread in the tile; the second is eight rows below.
__device__ __forceinline__ int ThreadRow() {
  return int(threadIdx.x) % WARPGROUP / 32 * 16 + int(threadIdx.x) % 32 / 4;
}

/// Keys that the rows of a thread see, and keys that all rows of the tile see.
struct Limits {
  int row[2], all;

  template <typename Params>
  __device__ __forceinline__ Limits(const Params& p, const WorkItem& item) {
    const bool causal = p.mask_mode == int(MaskMode::kCausal);
    auto limit = [&](int tile_row) {
      const int token = min(int(p.group.Divide(item.row_begin + tile_row)), item.qo_len - 1);
      return causal ? min(item.kv_end, item.kv_len - item.qo_len + token + 1) : item.kv_end;
    };
    row[0] = limit(ThreadRow()), row[1] = limit(ThreadRow() + 8), all = limit(0);
  }
};

/// Replace the scores of keys that a row does not see. `key`: first key of the block.
__device__ __forceinline__ void Mask(float (&s)[32], const Limits& limits, int key) {
  if (key + KEYS <= limits.all) return;
  const int column = key + 2 * (int(threadIdx.x) % 4);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (column + i / 4 * 8 + i % 2 >= limits.row[i / 2 % 2]) s[i] = -math::inf;
  }
}

/// Return the maxima of `before` and the scores times `scale`.
__device__ __forceinline__ RowPair Maxima(const float (&s)[32], const RowPair& before, float scale) {
  RowPair m;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float x = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int j = 1; j < 8; ++j) x = fmaxf(x, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
    m[h] = fmaxf(before[h], x * scale);
  }
  return m;
}

/// Return the factors that change sums relative to `before` into sums relative to `after`; 0 for rows without keys.
__device__ __forceinline__ RowPair Factors(const RowPair& before, const RowPair& after) {
  RowPair f;
#pragma unroll
  for (int h = 0; h < 2; ++h) f[h] = ptx::Exp2(before[h] - (after[h] == -math::inf ? 0.f : after[h]));
  return f;
}

/// Replace scores by weights 2^(score * scale - m), and add the weights to `sum`.
__device__ __forceinline__ void Weigh(float (&s)[32], const RowPair& m, float scale, RowPair& sum) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float base = m[h] == -math::inf ? 0.f : m[h];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        float& w = s[4 * j + 2 * h + x];
        w = ptx::Exp2(fmaf(w, scale, -base));
        sum[h] += w;
      }
    }
  }
}

/// Multiply two rows of accumulators. Skipped by warps whose maxima did not change.
template <int COUNT>
__device__ __forceinline__ void ScaleRows(float (&d)[COUNT], const RowPair& factor) {
  if (!__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) d[i] *= factor[i / 2 % 2];
}

/// Round weights to the A fragments of four products: words[4 k ..] belong to keys 16 k ..
template <typename T>
__device__ __forceinline__ void RoundWeights(uint32_t (&words)[16], const float (&s)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i] = Pack<T>(s[2 * i], s[2 * i + 1]);
}

/// Write and read one number per row. A row's number is the same in its four threads.
__device__ __forceinline__ void WriteRows(float* to, const RowPair& x) {
  if (threadIdx.x % 4 == 0) to[ThreadRow()] = x[0], to[ThreadRow() + 8] = x[1];
}
__device__ __forceinline__ RowPair ReadRows(const float* from) { return {from[ThreadRow()], from[ThreadRow() + 8]}; }

#endif

}  // namespace mla
}  // namespace attention
}  // namespace flashinfer
