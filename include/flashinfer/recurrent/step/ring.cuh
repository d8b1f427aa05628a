// SPDX-License-Identifier: Apache-2.0
// The ring of tokens that the state does not contain yet (Ring in step.h): folding it in, appending to it.
#pragma once
#include "rows.cuh"
#include "stage.cuh"

namespace flashinfer {
namespace recurrent {
namespace step {

__device__ __forceinline__ int64_t RingRow(const Ring& ring, const Place& at, int64_t j) {
  return ((ring.bases.data != nullptr ? ring.bases.At(at.n) : 0) + j) % ring.rows;
}

__device__ __forceinline__ float RingLogDecay(const Ring& ring, const Place& at, int64_t j) {
  return ring.g[at.slot * ring.g_slot + at.head * ring.rows + RingRow(ring, at, j)];
}

/// Apply the live rows of the ring to the state, and write the state if the ring is full enough to be flushed.
template <typename Rule, typename S, typename Shape>
__device__ __forceinline__ void FoldRing(const StepParams& p, const Place& at, int tile_row, Rows<S, Shape>& rows,
                                         Shared<Rule, Shape>& shared) {
  constexpr int K = Shape::K, VEC = 16 / sizeof(S);
  const Ring& ring = p.ring;
  const int64_t length = ring.lengths.At(at.n);
  if (length > 0) {
    const float last = RingLogDecay(ring, at, length - 1), decay = Exp(last);
#pragma unroll
    for (int r = 0; r < Shape::ROWS; ++r) {
#pragma unroll
      for (int e = 0; e < Shape::ELEMENTS; ++e) rows.s[r][e] *= decay;
    }
    for (int64_t begin = 0; begin < length; begin += Shape::TOKENS) {
      const int count = int(min(length - begin, int64_t(Shape::TOKENS)));
      __syncthreads();
      for (int i = threadIdx.x; i < count * K; i += THREADS) {
        const int64_t from = at.slot * ring.k_slot + (at.key_head * ring.rows + RingRow(ring, at, begin + i / K)) * K;
        shared.k[i / K][Position<VEC>(i % K)] = LoadNumber(ring.k, from + i % K, ring.type);
      }
      for (int i = threadIdx.x; i < count * Shape::TILE; i += THREADS) {
        const int row = at.first_row + i % Shape::TILE;
        const int64_t j = begin + i / Shape::TILE;
        const int64_t from = at.slot * ring.u_slot + (at.head * ring.rows + RingRow(ring, at, j)) * p.value_dim + row;
        const float weight = Exp(last - RingLogDecay(ring, at, j));
        shared.v[i / Shape::TILE][i % Shape::TILE] =
            row < p.value_dim ? weight * LoadNumber(ring.u, from, ring.type) : 0.f;
      }
      __syncthreads();
      for (int i = 0; i < count; ++i) {
        float u[Shape::ROWS];
#pragma unroll
        for (int r = 0; r < Shape::ROWS; ++r) u[r] = shared.v[i][tile_row + r * GROUPS];
        rows.Add(shared.k[i], u);
      }
    }
  }
  if (p.final.data != nullptr && length >= ring.flush_at) {
    const int64_t slot = p.final.slots.At(at.n);
    if (slot >= p.first_slot) rows.Store(p, p.final, slot, 0, at.head, at.first_row + tile_row);
  }
}

/// Append the cumulated log decays of staged tokens. They continue those of the ring, or start again after a flush.
template <typename Rule, typename Shape>
__device__ __forceinline__ void AppendLogDecays(const StepParams& p, const Place& at, int64_t begin, int count,
                                                const Shared<Rule, Shape>& shared) {
  if (!at.leads_head || threadIdx.x >= 32) return;  // a whole warp: a lane alone would come late to the next shuffle
  const int64_t length = p.ring.lengths.At(at.n);
  const bool is_flushed = p.final.data != nullptr && length >= p.ring.flush_at;
  float sum = 0.f;
  if (begin > 0 || (length > 0 && !is_flushed)) sum = RingLogDecay(p.ring, at, length + begin - 1);
  for (int i = 0; i < count; ++i) {
    sum += shared.log_decay[i];
    const int64_t row = RingRow(p.ring, at, length + begin + i);
    if (threadIdx.x == 0) p.ring.g[at.slot * p.ring.g_slot + at.head * p.ring.rows + row] = sum;
  }
  __syncwarp();
}

__device__ __forceinline__ void AppendCorrection(const StepParams& p, const Place& at, int64_t t, int row, float u) {
  const int64_t j = RingRow(p.ring, at, p.ring.lengths.At(at.n) + t);
  const int64_t to = at.slot * p.ring.u_slot + (at.head * p.ring.rows + j) * p.value_dim + row;
  StoreNumber(p.ring.u, to, p.ring.type, u);
}

}  // namespace step
}  // namespace recurrent
}  // namespace flashinfer
