// SPDX-License-Identifier: Apache-2.0
// Entry of the step kernel on CUDA: chooses how many rows a lane has.
#pragma once
#include <type_traits>

#include "../utils.cuh"
#include "step/kernel.cuh"
#include "step/one.cuh"

namespace flashinfer {
namespace recurrent {
namespace step {

template <typename Rule, typename T, typename S, typename Shape>
Status LaunchStep(const StepParams& p, Stream stream) {
  constexpr int64_t MAX_GRID_Y = 65535;
  const int64_t tiles = CeilDiv(p.value_dim, Shape::TILE), deep = CeilDiv(p.sequences, MAX_GRID_Y);
  const dim3 grid(unsigned(tiles * p.value_heads), unsigned(CeilDiv(p.sequences, deep)), unsigned(deep));
  return Launch(StepKernel<Rule, T, S, Shape>, grid, dim3(THREADS), p.enable_pdl, stream, p);
}

/// Rows of all states from which on a lane has several of them: fewer would leave SMs without a block.
constexpr int64_t MANY_ROWS = 16384;

/// One token of each sequence. Many rows: blocks of one warp, whose loads are not held up by other warps of a block; float32
/// through shared memory, which takes 276 us for 256 sequences instead of 284 (H200, GDN of 32 heads; bfloat16 gains nothing).
template <typename Rule, typename T, typename S, int K>
Status LaunchOne(const StepParams& p, Stream stream) {
  constexpr bool IS_FLOAT = std::is_same_v<S, float>;
  if (p.sequences * p.value_heads * p.value_dim < MANY_ROWS) {
    return LaunchOneShape<Rule, T, S, OneShape<K, 1, GROUPS, 4, 4, false>>(p, stream);
  }
  if constexpr (IS_FLOAT) {
    using Bulk = OneShape<K, 2, 16, 4, 5, true>;
    if (CanCopyBulk<Bulk>(p)) return LaunchOneShape<Rule, T, S, Bulk>(p, stream);
  }
  return LaunchOneShape<Rule, T, S, OneShape<K, 4, 16, 1, 16, false>>(p, stream);
}

template <typename Rule, typename T, typename S, int K>
Status LaunchMany(const StepParams& p, Stream stream) {
  if (p.sequences * p.value_heads * p.value_dim >= MANY_ROWS) {
    return LaunchStep<Rule, T, S, Shape<K, 4, Form::kMany>>(p, stream);
  }
  return LaunchStep<Rule, T, S, Shape<K, 1, Form::kMany>>(p, stream);
}

/// True if a call keeps more than outputs and states after each token or the last one, or if vectors cannot be loaded.
inline bool NeedsAny(const StepParams& p) {
  if (p.tokens > MANY) return true;
  if (p.boundaries.data != nullptr || p.recover > 0 || (p.each.data != nullptr && p.final.data != nullptr)) return true;
  return !p.is_vectorised || p.ring.k != nullptr || p.record.values != nullptr || p.record.keys != nullptr ||
         p.record.corrections != nullptr || p.checkpoints.states.data != nullptr;
}

inline bool IsOne(const StepParams& p) {
  constexpr int64_t MAX_GRID = 65535;
  return p.tokens == 1 && p.out != nullptr && p.sequences <= MAX_GRID && p.value_heads <= MAX_GRID &&
         p.form == GateForm::kProjections && p.starts.data == nullptr && p.accepted.data == nullptr &&
         p.each.data == nullptr && p.boundaries.data == nullptr && p.recover == 0;
}

template <typename Rule, typename T, typename S, int K>
Status LaunchDim(const StepParams& p, Stream stream) {
  constexpr bool ONLY_RINGS = std::is_same_v<S, float16_t>, IS_COMMON = K <= 128;  // others take less code
  if constexpr (!ONLY_RINGS && IS_COMMON) {
    if (!NeedsAny(p)) {
      if (IsOne(p)) return LaunchOne<Rule, T, S, K>(p, stream);
      return LaunchMany<Rule, T, S, K>(p, stream);
    }
  }
  return LaunchStep<Rule, T, S, Shape<K, 1, Form::kAny>>(p, stream);
}

}  // namespace step

template <typename Rule, typename T, typename S>
Status Step(const StepParams& p, Stream stream) {
  if (p.sequences == 0 || p.value_heads == 0 || p.value_dim == 0) return cudaSuccess;
  if (p.key_dim == 128) return step::LaunchDim<Rule, T, S, 128>(p, stream);
  if constexpr (Rule::CHANNEL_DECAY) {
    if (p.key_dim == 64) return step::LaunchDim<Rule, T, S, 64>(p, stream);
  } else if constexpr (std::is_same_v<S, float>) {
    if (p.key_dim == 256) return step::LaunchDim<Rule, T, S, 256>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace recurrent
}  // namespace flashinfer
