// SPDX-License-Identifier: Apache-2.0
// The kernel that searches for a threshold and holds the row meanwhile (definitions and parameters: sampling.h):
// renormalised rows, masked rows. A cluster of up to 8 blocks for each row.
#pragma once
#include "sampling.cuh"
#include "sampling_bracket.cuh"
#include "sampling_decide.cuh"

namespace flashinfer {
namespace sampling {
namespace held {

__device__ __forceinline__ Asked AskedOf(const FilterParams& filter, int64_t row, int64_t output, int vocab) {
  const int top_k = ValueOf(filter.top_k, filter.top_k_by_output ? output : row);
  Asked asked;
  asked.top_p = ValueOf(filter.top_p, filter.top_p_by_output ? output : row);
  asked.count = uint32_t(max(top_k, 1));
  asked.by_count = top_k < vocab;
  const bool limits_mass = !(asked.top_p >= 1.f);
  asked.by_mass = limits_mass && filter.filter == Filter::kBoth;
  asked.top_k_first = limits_mass && filter.filter == Filter::kTopKFirst;
  return asked;
}

/// Before the first barrier of the cluster.
__device__ __forceinline__ void Clear(Shared& shared) {
  for (int i = threadIdx.x; i < 2 * FIRST_BINS; i += THREADS) shared.bins[i] = 0;
  if (threadIdx.x == 0) {
    shared.listed = shared.largest = shared.is_heavy = 0;
    shared.cutoff = MOST;
  }
  __syncthreads();
}

/// SIGNED: logits below the threshold become -inf. Otherwise weights below it become 0, and the rest is divided by its
/// sum.
template <typename T, bool SIGNED>
__device__ __forceinline__ void FilterRow(const RowParams<T>& p, unsigned char* memory) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int64_t row = blockIdx.x / ptx::ClusterSize();
  const int vocab = int(p.vocab);
  const Slice slice(reinterpret_cast<float*>(memory + sizeof(Shared)), vocab);
  slice.StartLoad(p.input + row * p.input_stride, SIGNED ? -INFINITY : 0.f);
  Asked asked = AskedOf(p.filter, row, row, vocab);
  if (SIGNED) asked.by_mass = asked.top_k_first = false;
  Clear(shared);
  ptx::CopyWait<0>();
  Search<SIGNED> search{slice, asked, shared, vocab};
  search.Fill();
  ptx::ClusterSync();
  const Bracket bracket = search.Find();
  search.template Report<!SIGNED>(bracket);
  ptx::ClusterSync();
  if (ptx::ClusterRank() == 0) {
    const uint32_t threshold = search.template Decide<!SIGNED>(bracket);
    uint64_t total = 0;
    if constexpr (!SIGNED) {
      __syncthreads();
      for (int s = threadIdx.x % 32; s < int(ptx::ClusterSize()) * WARPS; s += 32) total += shared.segment_mass[s];
      total = WarpSum(total);
    }
    if (threadIdx.x < ptx::ClusterSize()) {
      *ptx::InBlock(&shared.threshold, threadIdx.x) = threshold;
      *ptx::InBlock(&shared.total_mass, threadIdx.x) = total;
    }
  }
  ptx::ClusterSync();
  const uint32_t threshold = shared.threshold;
  // A scaled weight is 2^31 times what its mass is relative to; masses have 2^40.
  const float normaliser = SIGNED || shared.total_mass == 0 ? 0.f : 512.f / __ull2float_rn(shared.total_mass);
  T* const out = p.out + row * p.out_stride + slice.begin;
  const bool vectorised = reinterpret_cast<uintptr_t>(out) % sizeof(Vec<T, 4>) == 0;
  slice.ForEach([&](int i, const float4& v) {
    float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (SIGNED) {
        x[e] = OrderedKey(x[e]) >= threshold ? x[e] : -INFINITY;
      } else {
        const float weight = Positive(x[e]);
        x[e] = Bits(weight) >= threshold ? search.scale(weight) * normaliser : 0.f;
      }
    }
    if (vectorised && i + 4 <= slice.size) {
      RoundTo<T, 4>(x).Store(out + i);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (i + e < slice.size) out[i + e] = FromFloat<T>(x[e]);
      }
    }
  });
}

template <typename T, bool SIGNED>
__global__ void __launch_bounds__(THREADS, BLOCKS) RowsKernel(const __grid_constant__ RowParams<T> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  FilterRow<T, SIGNED>(p, memory);
}

}  // namespace held
}  // namespace sampling
}  // namespace flashinfer
