// SPDX-License-Identifier: Apache-2.0
// Rotary embedding of the heads of one or two tensors, the call of every layer of a model (formulas: rope.h; what this
// kernel cannot do is left to rope.cuh). Bound by DRAM: each byte is read once and written once.
//
// A thread has two 16-byte vectors of a head, columns c and c + R/2, or those of two heads; a block is (c, heads) of
// one token, so nobody divides. The loads are issued first. While they fly, the block fetches the cosines and sines of
// its token into shared memory, or works them out, a pair a thread.
//
// Measured on an H200 (16384 tokens of 32 + 8 heads of 128 in bf16, in place, L2 full of dirty lines; the same without
// angles takes 84.9 us):
// * A token is prefetched into L2 5 MB before its turn: 84.6 -> 83.3 us, by table 84.7 -> 83.5; 2.5 MB gain half of it.
//   Kernels without that code serve batches below 32 MB: it takes 0.4 us of 9.5 where there is nothing to prefetch.
// * Two heads per thread 84.8 us, one 85.5, five 87. Loads after the angles 88. Hints to the caches gain nothing.
// * By table 86.7 us, with the row of a later token brought into L2; 87.4 if each thread reads its part of the row.
// * One vector per thread, the other half from another lane: 93 to 104 us, although without angles it is the fastest
//   (83.7): while angles are worked out, too little is on the way. The same for several tokens per block, 85.7 to 100.
// * Style and source of the angles are known when it is compiled: one head per thread takes 32 registers instead of 43,
//   and 65536 tokens of 8 + 1 heads 77 us instead of 86.
//   test  pytest tests/rope      bench  python benchmarks/bench_rope.py
#pragma once
#include "ptx/pdl.cuh"
#include "rope_angles.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace rope {

constexpr int HEADS_THREADS = 96;

/// Tensor (tokens, heads, width). Strides are in elements.
template <typename T>
struct HeadsPart {
  const T* in;
  T* out;
  uint32_t in_token, in_head, out_token, out_head;

  __device__ __forceinline__ const T* From(uint32_t token, uint32_t head) const {
    return in + (uint64_t{token} * in_token + uint64_t{head} * in_head);
  }
  __device__ __forceinline__ T* To(uint32_t token, uint32_t head) const {
    return out + (uint64_t{token} * out_token + uint64_t{head} * out_head);
  }
};

template <typename T>
struct HeadsArgs {
  HeadsPart<T> q, k;
  uint32_t tokens, q_heads, heads;  // heads of both
  uint32_t ahead;                   // prefetch distance in tokens; 0 for no prefetch
  int half;                         // R / 2
  RopePositions positions;
  RopeAngles angles;
};

/// Source of the cosines and sines of a token: a row of the table, or its position, given or searched.
enum class AnglesFrom { kTable, kPosIds, kRagged };

/// Kernel with ITEMS heads per thread. PREFETCH: a later token is prefetched into L2.
template <typename T, AnglesFrom FROM, bool INTERLEAVE, int ITEMS, bool PREFETCH>
__global__ void __launch_bounds__(HEADS_THREADS) RopeHeadsKernel(const __grid_constant__ HeadsArgs<T> a) {
  constexpr int VEC = 16 / sizeof(T);
  extern __shared__ __align__(16) float table[];  // R/2 cosines, R/2 sines
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const uint32_t token = blockIdx.z * gridDim.y + blockIdx.y;  // the grid may have a few blocks too many
  if (token >= a.tokens) return;
  const uint32_t threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const uint32_t column = threadIdx.x * VEC, first = blockIdx.x * blockDim.y * ITEMS + threadIdx.y;
  auto head_of = [&](int i) { return first + i * blockDim.y; };
  int64_t position = 0;
  if constexpr (FROM != AnglesFrom::kRagged) position = IndexAt(a.positions.pos_ids, token, a.positions.wide);
  Vec<T, VEC> x[ITEMS], y[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const uint32_t head = min(head_of(i), a.heads - 1);
    const T* in = head < a.q_heads ? a.q.From(token, head) : a.k.From(token, head - a.q_heads);
    x[i] = Vec<T, VEC>::Load(in + column);
    y[i] = Vec<T, VEC>::Load(in + column + a.half);
  }

  if constexpr (PREFETCH) {
    const uint32_t later = token + a.ahead, width = 2 * a.half * sizeof(T);
    if (thread == 0 && blockIdx.x == 0 && later < a.tokens) {
      ptx::PrefetchL2(a.q.From(later, 0), a.q_heads * width);
      if (a.heads != a.q_heads) ptx::PrefetchL2(a.k.From(later, 0), (a.heads - a.q_heads) * width);
    }
  }
  if constexpr (FROM == AnglesFrom::kTable) {
    using V = Vec<float, 4>;
    const uint32_t later = token + TOKENS_AHEAD;
    if (blockIdx.x == 0 && later < a.tokens) PrefetchRow(a.angles, a.positions, later, 2 * a.half, thread);
    const float* row = CacheRow(a.angles, position);
    for (int j = 4 * thread; j < 2 * a.half; j += 4 * threads) V::Load(row + j).Store(table + j);
  } else {
    if constexpr (FROM == AnglesFrom::kRagged) {
      if (!RaggedPosition(a.positions, token, thread % 32, position)) return;
    }
#pragma unroll 1
    for (int j = thread; j < a.half; j += threads) CosSin(a.angles, position, j, table[j], table[a.half + j]);
  }
  __syncthreads();

#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const uint32_t head = head_of(i);
    if (head >= a.heads) return;
    float u[VEC], w[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      u[j] = x[i].Float(j);
      w[j] = y[i].Float(j);
    }
    RotateVectors<VEC>(u, w, table, a.half, column, column + a.half, INTERLEAVE);
    T* out = head < a.q_heads ? a.q.To(token, head) : a.k.To(token, head - a.q_heads);
    RoundTo<T, VEC>(u).Store(out + column);
    RoundTo<T, VEC>(w).Store(out + column + a.half);
  }
}

/// Make the kernel arguments. Returns false if this kernel does not support the strides or the shape. The caller has
/// checked `vectorised`.
template <typename T>
bool MakeHeads(const RopeParams& p, HeadsArgs<T>& a) {
  constexpr int VEC = 16 / sizeof(T);
  const int64_t columns = p.rotary_dim / (2 * VEC);
  if (p.num_segments > 2 || columns > 64 || (columns & (columns - 1)) != 0) return false;
  const bool aligned_table = IsAligned(p.angles.cache, 16) && p.angles.cache_stride % 4 == 0;
  if (p.angles.cache != nullptr && (p.positions.pos_ids == nullptr || !aligned_table)) return false;
  HeadsPart<T>* parts[2] = {&a.q, &a.k};
  bool dense = true;
  for (int i = 0; i < p.num_segments; ++i) {
    const RopeSegment& s = p.segments[i];
    const bool copies = s.width != p.rotary_dim && !s.InPlace();
    if (copies || std::max({s.in_token, s.in_head, s.out_row, s.out_head, s.heads}) > INT32_MAX) return false;
    *parts[i] = {static_cast<const T*>(s.in), static_cast<T*>(s.out), uint32_t(s.in_token),
                 uint32_t(s.in_head),         uint32_t(s.out_row),    uint32_t(s.out_head)};
    a.heads += uint32_t(s.heads);
    dense = dense && s.in_head == p.rotary_dim && s.heads > 0;
  }
  a.q_heads = uint32_t(p.segments[0].heads);
  a.tokens = uint32_t(p.tokens);
  a.ahead = dense ? TokensAhead(p.tokens, a.heads * p.rotary_dim * sizeof(T)) : 0;
  a.half = int(p.rotary_dim / 2);
  a.positions = p.positions;
  a.angles = p.angles;
  return true;
}

template <typename T, AnglesFrom FROM>
Status LaunchHeadsFrom(const RopeParams& p, const HeadsArgs<T>& a, Stream stream) {
  constexpr int VEC = 16 / sizeof(T);
  const int64_t columns = a.half / VEC, items = a.heads * columns;
  // Two heads per thread pay when there is bandwidth to fill: many tokens of many heads.
  const bool two = p.tokens >= 1024 && items > 160;
  const int64_t per_thread = two ? 2 : 1, most = items <= HEADS_THREADS ? HEADS_THREADS : 64;
  const int64_t threads = std::min(CeilDiv(CeilDiv(items, per_thread), 32) * 32, most);
  const dim3 block(columns, threads / columns);
  const int64_t z = CeilDiv(p.tokens, MAX_GRID_Y);
  const dim3 grid(CeilDiv(a.heads, block.y * per_thread), CeilDiv(p.tokens, z), z);
  auto launch = [&](auto kernel) {
    return LaunchShared(kernel, grid, block, p.rotary_dim * sizeof(float), p.enable_pdl, stream, a);
  };
  auto choose = [&](auto one_head, auto two_heads, auto prefetching) {
    return launch(!two ? one_head : a.ahead == 0 ? two_heads : prefetching);
  };
  if (p.interleave) {
    return choose(RopeHeadsKernel<T, FROM, true, 1, false>, RopeHeadsKernel<T, FROM, true, 2, false>,
                  RopeHeadsKernel<T, FROM, true, 2, true>);
  }
  return choose(RopeHeadsKernel<T, FROM, false, 1, false>, RopeHeadsKernel<T, FROM, false, 2, false>,
                RopeHeadsKernel<T, FROM, false, 2, true>);
}

template <typename T>
Status LaunchHeads(const RopeParams& p, const HeadsArgs<T>& a, Stream stream) {
  if (p.angles.cache != nullptr) return LaunchHeadsFrom<T, AnglesFrom::kTable>(p, a, stream);
  if (p.positions.pos_ids != nullptr) return LaunchHeadsFrom<T, AnglesFrom::kPosIds>(p, a, stream);
  return LaunchHeadsFrom<T, AnglesFrom::kRagged>(p, a, stream);
}

}  // namespace rope
}  // namespace flashinfer
