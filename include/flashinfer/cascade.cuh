// SPDX-License-Identifier: Apache-2.0
// Merging attention states on CUDA (formulas and parameters: cascade.h). Bound by DRAM.
//
// A thread makes one 16-byte vector of the output of a (row, head), or every blockDim.x-th of them where the head has
// more vectors than a block has threads. All lanes of a head read its scores, which is one transaction. Blocks are
// (vectors, heads, rows) and neighbouring blocks read neighbouring heads.
//   test  pytest tests/cascade      bench  python benchmarks/bench_cascade.py
#pragma once
#include "cascade.h"
#include "ptx/math.cuh"
#include "ptx/pdl.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace cascade {

constexpr int THREADS = 128;
constexpr int IN_FLIGHT = 4;  // states whose vectors a thread loads before it uses the first

/// Return the number to subtract from all scores: their maximum, or 0 if it is -inf, where the difference would be NaN.
__device__ __forceinline__ float Base(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

/// Return 1 / total weight, or 0 if the total is 0, so that the result is 0.
__device__ __forceinline__ float Normaliser(float total) { return total == 0.f ? 0.f : ptx::Reciprocal(total); }

/// Compute sum += weight * v. A state of weight 0 is skipped: its v may be anything, even NaN.
template <typename T, int VEC>
__device__ __forceinline__ void Accumulate(float (&sum)[VEC], float weight, const Vec<T, VEC>& v) {
  if (weight == 0.f) return;
#pragma unroll
  for (int i = 0; i < VEC; ++i) sum[i] += weight * v.Float(i);
}

/// Row and head of a thread. Blocks iterate over groups of rows, and within a group of rows over groups of heads.
struct Place {
  uint32_t row, head;
  __device__ __forceinline__ explicit Place(const FastDivisor& head_groups) {
    const uint32_t row_group = head_groups.Divide(blockIdx.x);
    const uint32_t head_group = blockIdx.x - row_group * head_groups.divisor;
    row = row_group * blockDim.z + threadIdx.z;
    head = head_group * blockDim.y + threadIdx.y;
  }
};

template <typename T>
__device__ __forceinline__ T* RowOfV(const AttentionStates<T>& x, const Place& at) {
  return x.v + at.row * x.v_row_stride + at.head * x.v_head_stride;
}

template <typename T>
__device__ __forceinline__ auto* ScoreOf(const AttentionStates<T>& x, const Place& at) {
  return x.s + at.row * x.s_row_stride + at.head * x.s_head_stride;
}

template <typename T, int VEC>
__global__ void __launch_bounds__(THREADS)
    MergeStateKernel(const __grid_constant__ MergeStateParams<T> p, const __grid_constant__ FastDivisor head_groups) {
  using V = Vec<T, VEC>;
  ptx::GridDependencyWait();
  const Place at(head_groups);
  bool active = at.row < p.rows && at.head < p.heads;
  if (active && p.mask != nullptr) active = p.mask[at.row * p.mask_stride] != 0;
  float s = 0.f;
  if (active) {
    const float s_a = *ScoreOf(p.a, at), s_b = *ScoreOf(p.b, at);
    const T *v_a = RowOfV(p.a, at), *v_b = RowOfV(p.b, at);
    T* out = RowOfV(p.out, at);
    int i = threadIdx.x * VEC;
    V a = V::Load(v_a + i), b = V::Load(v_b + i);
    ptx::LaunchDependents();  // also keeps the compiler from moving loads below this point
    const float maximum = fmaxf(s_a, s_b), base = Base(maximum);
    const float weight_a = ptx::Exp2(s_a - base), weight_b = ptx::Exp2(s_b - base), total = weight_a + weight_b;
    const float normaliser = Normaliser(total);
    s = maximum + __log2f(total);
    while (true) {
      float sum[VEC] = {};
      Accumulate(sum, weight_a * normaliser, a);
      Accumulate(sum, weight_b * normaliser, b);
      RoundTo<T, VEC>(sum).Store(out + i);
      i += blockDim.x * VEC;
      if (i >= int(p.head_dim)) break;
      a = V::Load(v_a + i), b = V::Load(v_b + i);
    }
  }
  __syncthreads();  // the output score may alias the input score, which the other lanes of the head read
  if (active && threadIdx.x == 0) *ScoreOf(p.out, at) = s;
}

template <typename T, int VEC>
__global__ void __launch_bounds__(THREADS)
    MergeStatesKernel(const __grid_constant__ MergeStatesParams<T> p, const __grid_constant__ FastDivisor head_groups) {
  using V = Vec<T, VEC>;
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const Place at(head_groups);
  if (at.row >= p.rows || at.head >= p.heads) return;
  int64_t begin = 0;
  int num_states = int(p.num_states);
  if (p.indptr != nullptr) {
    begin = p.indptr[at.row];
    num_states = p.indptr[at.row + 1] - int(begin);
  }
  const float* const first_s = ScoreOf(p.in, at) + begin * p.s_state_stride;
  const T* const first_v = RowOfV(p.in, at) + begin * p.v_state_stride;
  const int head_dim = int(p.head_dim);
  float maximum, total;  // equal in every iteration of the loop; thread 0 has at least one iteration
  for (int i = threadIdx.x * VEC; i < head_dim; i += blockDim.x * VEC) {
    maximum = -INFINITY, total = 0.f;
    float sum[VEC] = {};
    for (int state = 0; state < num_states; state += IN_FLIGHT) {
      V v[IN_FLIGHT];
      float s[IN_FLIGHT];
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; ++k) {
        const int from = min(state + k, num_states - 1);  // past the end: the last state again, with weight 0
        v[k] = V::Load(first_v + from * p.v_state_stride + i);
        s[k] = first_s[from * p.s_state_stride];
      }
      float next = maximum;
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; ++k) {
        if (state + k >= num_states) s[k] = -INFINITY;
        next = fmaxf(next, s[k]);
      }
      const float base = Base(next), rescale = ptx::Exp2(maximum - base);
      maximum = next;
      total *= rescale;
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum[j] *= rescale;
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; ++k) {
        const float weight = ptx::Exp2(s[k] - base);
        total += weight;
        Accumulate(sum, weight, v[k]);
      }
    }
    const float normaliser = Normaliser(total);
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum[j] *= normaliser;
    RoundTo<T, VEC>(sum).Store(RowOfV(p.out, at) + i);
  }
  if (threadIdx.x == 0) *ScoreOf(p.out, at) = maximum + __log2f(total);
}

template <typename T, int VEC>
__global__ void __launch_bounds__(THREADS)
    AddSinksKernel(const __grid_constant__ AddSinksParams<T> p, const __grid_constant__ FastDivisor head_groups) {
  using V = Vec<T, VEC>;
  constexpr float LOG2_E = 1.4426950408889634f;
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const Place at(head_groups);
  const bool active = at.row < p.rows && at.head < p.heads;
  float s = 0.f;
  if (active) {
    const float own = *ScoreOf(p.states, at), sink = p.sinks[at.head * p.sink_stride] * LOG2_E;
    const float maximum = fmaxf(own, sink), base = Base(maximum), weight = ptx::Exp2(own - base);
    const float total = weight + ptx::Exp2(sink - base), factor = weight * Normaliser(total);
    s = maximum + __log2f(total);
    T* const v = RowOfV(p.states, at);
    for (int i = threadIdx.x * VEC; i < int(p.head_dim); i += blockDim.x * VEC) {
      float sum[VEC] = {};
      Accumulate(sum, factor, V::Load(v + i));
      RoundTo<T, VEC>(sum).Store(v + i);
    }
  }
  __syncthreads();  // the other lanes of the head have read their score
  if (active && threadIdx.x == 0) *ScoreOf(p.states, at) = s;
}

/// True if every v starts at a multiple of `vec` elements.
template <typename T>
bool CanVectorise(const AttentionStates<T>& x, int vec) {
  return IsAligned(x.v, vec * sizeof(T)) && x.v_row_stride % vec == 0 && x.v_head_stride % vec == 0;
}

template <typename Params>
Status LaunchOverHeads(void (*kernel)(Params, FastDivisor), const Params& p, int vec, Stream stream) {
  if (p.rows == 0 || p.heads == 0) return cudaSuccess;
  if (p.head_dim > INT32_MAX / 2 || p.heads > INT32_MAX || p.rows > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t lanes = std::min<int64_t>(CeilDiv(p.head_dim, vec), THREADS);
  const int64_t heads = std::min(THREADS / lanes, p.heads), rows = std::min<int64_t>(THREADS / (lanes * heads), 64);
  const int64_t head_groups = CeilDiv(p.heads, heads), row_groups = CeilDiv(p.rows, rows);
  if (row_groups > INT32_MAX / head_groups) return cudaErrorInvalidValue;
  const dim3 block(lanes, heads, rows), grid(row_groups * head_groups);
  return Launch(kernel, grid, block, p.enable_pdl, stream, p, FastDivisor(uint32_t(head_groups)));
}

}  // namespace cascade

template <typename T>
Status MergeState(const MergeStateParams<T>& p, Stream stream) {
  using namespace cascade;
  constexpr int VEC = 16 / sizeof(T);
  if (p.head_dim % VEC == 0 && CanVectorise(p.a, VEC) && CanVectorise(p.b, VEC) && CanVectorise(p.out, VEC)) {
    return LaunchOverHeads(MergeStateKernel<T, VEC>, p, VEC, stream);
  }
  return LaunchOverHeads(MergeStateKernel<T, 1>, p, 1, stream);
}

template <typename T>
Status MergeStates(const MergeStatesParams<T>& p, Stream stream) {
  using namespace cascade;
  constexpr int VEC = 16 / sizeof(T);
  if (p.num_states > INT32_MAX / 2) return cudaErrorInvalidValue;
  if (p.head_dim % VEC == 0 && p.v_state_stride % VEC == 0 && CanVectorise(p.in, VEC) && CanVectorise(p.out, VEC)) {
    return LaunchOverHeads(MergeStatesKernel<T, VEC>, p, VEC, stream);
  }
  return LaunchOverHeads(MergeStatesKernel<T, 1>, p, 1, stream);
}

template <typename T>
Status AddSinks(const AddSinksParams<T>& p, Stream stream) {
  using namespace cascade;
  constexpr int VEC = 16 / sizeof(T);
  if (p.head_dim % VEC == 0 && CanVectorise(p.states, VEC)) {
    return LaunchOverHeads(AddSinksKernel<T, VEC>, p, VEC, stream);
  }
  return LaunchOverHeads(AddSinksKernel<T, 1>, p, 1, stream);
}

}  // namespace flashinfer
