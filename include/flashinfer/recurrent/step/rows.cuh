// SPDX-License-Identifier: Apache-2.0
// Rows of the state in registers: lane c of a group of eight has elements c * VEC + [0, VEC) of each 8 * VEC.
#pragma once
#include "numbers.cuh"
#include "shape.h"

namespace flashinfer {
namespace recurrent {
namespace step {

template <typename S, typename Shape>
struct Rows {
  static constexpr int VEC = 16 / sizeof(S), VECTORS = Shape::ELEMENTS / VEC;
  static constexpr bool IS_VECTORISED = Shape::FORM != Form::kAny;
  using V = Vec<S, VEC>;

  float s[Shape::ROWS][Shape::ELEMENTS];
  V raw[Shape::ROWS][VECTORS];

  /// Start to load the rows; `row` is the first one, the next is GROUPS later. Nothing waits for them here.
  __device__ __forceinline__ void Load(const StepParams& p, const States& from, int64_t slot, int head, int row) {
    const int column = threadIdx.x % COLUMNS * VEC;
#pragma unroll
    for (int r = 0; r < Shape::ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) raw[r][i] = V::Zero();
      if (from.data == nullptr || row + r * GROUPS >= p.value_dim) continue;
      const S* at = static_cast<const S*>(from.data) + from.Offset(slot, 0, head, row + r * GROUPS) + column;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        raw[r][i] = LoadSome<S, VEC>(at + i * VEC * COLUMNS, IS_VECTORISED || p.is_vectorised);
      }
    }
  }

  /// Convert what has been loaded.
  __device__ __forceinline__ void Convert() {
#pragma unroll
    for (int r = 0; r < Shape::ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < Shape::ELEMENTS; ++i) s[r][i] = raw[r][i / VEC].Float(i % VEC);
    }
  }

  __device__ __forceinline__ void Store(const StepParams& p, const States& to, int64_t slot, int64_t token, int head,
                                        int row) const {
    const int column = threadIdx.x % COLUMNS * VEC;
#pragma unroll
    for (int r = 0; r < Shape::ROWS; ++r) {
      if (row + r * GROUPS >= p.value_dim) continue;
      S* at = static_cast<S*>(to.data) + to.Offset(slot, token, head, row + r * GROUPS) + column;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        float x[VEC];
#pragma unroll
        for (int j = 0; j < VEC; ++j) x[j] = s[r][i * VEC + j];
        StoreSome(at + i * VEC * COLUMNS, RoundTo<S, VEC>(x), IS_VECTORISED || p.is_vectorised);
      }
    }
  }

  /// Multiply by the decay of a token and return this lane's parts of the dot products with k and q.
  template <typename Rule>
  __device__ __forceinline__ void Decay(const Shared<Rule, Shape>& shared, int i, float (&sk)[Shape::ROWS],
                                        float (&sq)[Shape::ROWS]) {
    const int lane = threadIdx.x % COLUMNS * 4;
    const float of_head = shared.decay[i][0];
#pragma unroll
    for (int r = 0; r < Shape::ROWS; ++r) sk[r] = sq[r] = 0.f;
#pragma unroll
    for (int e = 0; e < Shape::ELEMENTS; e += 4) {
      const auto k = Vec<float, 4>::Load(&shared.k[i][e * COLUMNS + lane]);
      const auto q = Vec<float, 4>::Load(&shared.q[i][e * COLUMNS + lane]);
      Vec<float, 4> decay;
      if constexpr (Rule::CHANNEL_DECAY) decay = Vec<float, 4>::Load(&shared.decay[i][e * COLUMNS + lane]);
#pragma unroll
      for (int r = 0; r < Shape::ROWS; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          s[r][e + j] *= Rule::CHANNEL_DECAY ? decay[j] : of_head;
          sk[r] += s[r][e + j] * k[j];
          sq[r] += s[r][e + j] * q[j];
        }
      }
    }
  }

  /// s += u k^T with a vector of the shared memory in the place of k.
  __device__ __forceinline__ void Add(const float* k, const float (&u)[Shape::ROWS]) {
    const int lane = threadIdx.x % COLUMNS * 4;
#pragma unroll
    for (int e = 0; e < Shape::ELEMENTS; e += 4) {
      const auto k4 = Vec<float, 4>::Load(k + e * COLUMNS + lane);
#pragma unroll
      for (int r = 0; r < Shape::ROWS; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) s[r][e + j] += u[r] * k4[j];
      }
    }
  }
};

}  // namespace step
}  // namespace recurrent
}  // namespace flashinfer
