// SPDX-License-Identifier: Apache-2.0
// The experts of a single token, found by each warp for itself: its first loads of weights wait for no barrier.
#pragma once
#include "shape.h"

namespace flashinfer {
namespace fused_moe {
namespace mono {

constexpr int TOKEN_MAX_SLOTS = 32;  // a lane for each

/// Experts of this rank that the token has chosen, ascending. A warp's, or a block's, in shared memory.
struct TokenExperts {
  int32_t expert[TOKEN_MAX_SLOTS];  // local number
  int32_t slot[TOKEN_MAX_SLOTS];    // the first with this expert
  float factor[TOKEN_MAX_SLOTS];    // sum of the scales of its slots
};

/// Fill the table of a warp and return the number of experts; all lanes call it.
__device__ __forceinline__ int FindExperts(const MonoParams& p, TokenExperts& to) {
  const int lane = int(threadIdx.x) % 32;
  int expert = -1;
  float scale = 0.f, factor = 0.f;
  if (lane < p.top_k) {
    expert = p.experts[lane] - p.first_expert;
    scale = p.scales == nullptr ? 1.f : p.scales[lane];
    if (expert < 0 || expert >= p.num_experts) expert = -1;
  }
  bool is_first = expert >= 0;
#pragma unroll 4
  for (int i = p.top_k - 1; i >= 0; --i) {
    const int other = __shfl_sync(~0u, expert, i);
    const float scale_of_other = __shfl_sync(~0u, scale, i);
    if (other == expert) factor += scale_of_other;
    if (other == expert && i < lane) is_first = false;
  }
  const unsigned firsts = __ballot_sync(~0u, is_first);
  // Experts have the order of their numbers, as in RouteOneToken: sums do not depend on the order of slots.
  int rank = 0;
#pragma unroll 4
  for (int i = 0; i < p.top_k; ++i) rank += __shfl_sync(~0u, is_first ? expert : INT32_MAX, i) < expert;
  if (is_first) to.expert[rank] = expert, to.slot[rank] = lane, to.factor[rank] = factor;
  __syncwarp();
  return __popc(firsts);
}

}  // namespace mono
}  // namespace fused_moe
}  // namespace flashinfer
