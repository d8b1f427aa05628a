// SPDX-License-Identifier: Apache-2.0
// Sums of several rows over the lanes that share them.
#pragma once

namespace flashinfer {
namespace recurrent {

/// Sum each of N values over LANES lanes. Lane l gets in x[0] the sum of value ReducedRow(l): halves of the values are
/// exchanged while more than one is left, which takes N shuffles instead of N log2(LANES).
template <int LANES, int N>
__device__ __forceinline__ void ReduceRows(float (&x)[N], int sublane) {
  int left = N;
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) {
    if (left > 1) {
      left /= 2;
      const bool is_upper = sublane & mask;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        if (i >= left) break;
        const float sent = is_upper ? x[i] : x[i + left];
        x[i] = (is_upper ? x[i + left] : x[i]) + __shfl_xor_sync(0xffffffffu, sent, mask);
      }
    } else {
      x[0] += __shfl_xor_sync(0xffffffffu, x[0], mask);
    }
  }
}

/// Row of the sum that ReduceRows leaves in a lane: the upper bits of the lane's number. Lanes that agree in them have the
/// same sum.
template <int LANES, int N>
__device__ __forceinline__ int ReducedRow(int sublane) {
  return LANES >= N ? sublane / (LANES / N) : 0;
}
template <int LANES, int N>
__device__ __forceinline__ bool WritesReduced(int sublane) {
  static_assert(LANES >= N, "a lane would hold several sums");
  return sublane % (LANES / N) == 0;
}

}  // namespace recurrent
}  // namespace flashinfer
