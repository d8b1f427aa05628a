// SPDX-License-Identifier: Apache-2.0
// Sums over heads of index scores in the registers of matrix products, which both CUDA kernels share.
//
// A product has keys as rows and heads as columns. Lane l has, of rows r = l / 4 and r + 8, columns 8 j + 2 c + {0, 1} with
// c = l % 4. The rows of q lie so that these are the heads h = 8 j + c and 8 j + 4 + c: column n of a group of eight is head
// 4 (n % 2) + n / 2 of the group. So lane c adds chain h % 4 = c in ascending order (mqa_logits.h) by itself.
#pragma once
#include <cuda_fp16.h>

#include "../ptx/math.cuh"
#include "mqa_logits.h"

namespace flashinfer {
namespace indexer {

/// Row of q that is column `n` of a product; both counted over all slots.
FLASHINFER_HD int RowOfColumn(int n) { return n / 8 * 8 + n % 2 * 4 + n % 8 / 2; }

/// Sums of the chain of this lane, for its two keys.
struct ChainSums {
  float of[2] = {0.f, 0.f};

  /// Add one head: products with both keys.
  __device__ __forceinline__ void Add(float weight, float first, float second) {
    of[0] = fmaf(weight, ptx::Relu(first), of[0]);
    of[1] = fmaf(weight, ptx::Relu(second), of[1]);
  }

  /// Add the four chains in order: the sum of key r in lanes c = 0, of key r + 8 in lanes c = 1. Three shuffles serve both.
  __device__ __forceinline__ float Total() const {
    const bool is_odd = threadIdx.x % 2 == 1;
    const float kept = is_odd ? of[1] : of[0];
    const float other = __shfl_xor_sync(~0u, is_odd ? of[0] : of[1], 1);
    const float far_kept = __shfl_xor_sync(~0u, kept, 2), far_other = __shfl_xor_sync(~0u, other, 2);
    const float third = is_odd ? far_other : far_kept, fourth = is_odd ? far_kept : far_other;
    return ((kept + other) + third) + fourth;
  }
};

/// Store a score as the type of the result.
template <typename Params>
__device__ __forceinline__ void StoreScore(const Params& p, int64_t row, int column, float score) {
  const int64_t at = row * p.out_stride + column;
  if (p.is_half) {
    static_cast<__half*>(p.out)[at] = __float2half_rn(score);
  } else {
    static_cast<float*>(p.out)[at] = score;
  }
}

}  // namespace indexer
}  // namespace flashinfer
