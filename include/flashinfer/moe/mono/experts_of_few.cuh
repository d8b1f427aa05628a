// SPDX-License-Identifier: Apache-2.0
// The experts of few tokens, found by each block of kernel.cuh for itself: a few hundred comparisons take less time than
// a launch that sorts.
#pragma once
#include "shape.h"

namespace flashinfer {
namespace fused_moe {
namespace mono {

/// Weight and slot of a token at an active expert.
struct Choice {
  int32_t pair;  // the first slot of the token with this expert, as token * top_k + slot; -1: none
  float factor;  // sum of the scales of its slots
};

/// Tables of a block, in shared memory. TOKENS is a multiple of 8.
template <int TOKENS>
struct Choices {
  int32_t active[MONO_MAX_PAIRS];  // local numbers, ascending
  Choice of[MONO_MAX_PAIRS][TOKENS];
  int32_t local[MONO_MAX_PAIRS];  // local expert of each pair; -1: another rank has it
  float scales[MONO_MAX_PAIRS];
  uint8_t is_first[MONO_MAX_PAIRS];  // no earlier pair has the expert
  int32_t count;
};

/// Fill the tables; all threads of the block call it, at least MONO_MAX_PAIRS of them. Ends with a barrier.
template <int TOKENS>
__device__ __forceinline__ void FindChoices(const MonoParams& p, Choices<TOKENS>& to) {
  const int pairs = p.tokens * p.top_k, thread = int(threadIdx.x), lane = thread % 32;
  const int warp = thread / 32, warps = int(blockDim.x) / 32;
  if (thread < pairs) {
    const int expert = p.experts[thread] - p.first_expert;
    to.local[thread] = expert < 0 || expert >= p.num_experts ? -1 : expert;
    to.scales[thread] = p.scales == nullptr ? 1.f : p.scales[thread];
  }
  if (thread == 0) to.count = 0;
  __syncthreads();
  for (int pair = warp; pair < pairs; pair += warps) {  // a warp compares a pair with 32 others at once
    const int expert = to.local[pair];
    bool is_first = expert >= 0;
    for (int i = lane; i - lane < pair; i += 32) is_first &= !__any_sync(~0u, i < pair && to.local[i] == expert);
    if (lane == 0) to.is_first[pair] = is_first;
  }
  __syncthreads();
  for (int pair = warp; pair < pairs; pair += warps) {
    if (!to.is_first[pair]) continue;
    const int expert = to.local[pair];
    int rank = 0;
    for (int i = lane; i - lane < pairs; i += 32) {
      rank += __popc(__ballot_sync(~0u, i < pairs && to.is_first[i] && to.local[i] < expert));
    }
    if (lane == 0) to.active[rank] = expert, atomicAdd(&to.count, 1);
  }
  __syncthreads();
  for (int i = thread; i < to.count * TOKENS; i += int(blockDim.x)) {
    const int token = i % TOKENS, wanted = to.active[i / TOKENS];
    Choice choice{-1, 0.f};
    for (int slot = p.top_k - 1; slot >= 0 && token < p.tokens; --slot) {
      const int pair = token * p.top_k + slot;
      if (to.local[pair] != wanted) continue;
      choice.pair = pair, choice.factor += to.scales[pair];
    }
    to.of[i / TOKENS][token] = choice;
  }
  __syncthreads();
}

}  // namespace mono
}  // namespace fused_moe
}  // namespace flashinfer
