// SPDX-License-Identifier: Apache-2.0
// Kernels that search for a threshold and hold the row meanwhile (definitions and parameters: sampling.h): tokens,
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

/// Draw from the segments of block 0: found(column) in one thread, -1 where nothing is kept.
template <typename Found>
__device__ __forceinline__ void Draw(const float* row, int vocab, const Slice& slice, float threshold, int emax,
                                     Shared& shared, const Found& found) {
  constexpr int EACH = SEGMENTS / 32;
  const int lane = threadIdx.x % 32, segments = ptx::ClusterSize() * WARPS;
  if (threadIdx.x < 32) {
    uint64_t mass[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      mass[i] = lane * EACH + i < segments ? shared.segment_mass[lane * EACH + i] : 0;
      sum += mass[i];
    }
    uint64_t through = WarpInclusive(sum), before = through - sum;
    const uint64_t total = __shfl_sync(ALL, through, 31), target = TargetOf(shared.random, total);
    if (lane == 0 && total == 0) shared.segment = -1;
    if (total != 0 && target > before && target <= through) {
      int chosen = -1;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        if (chosen < 0 && target <= before + mass[i]) chosen = i;
        if (chosen < 0) before += mass[i];
      }
      shared.segment = lane * EACH + chosen;
      shared.before = target - before;  // what is drawn of the segment
    }
  }
  __syncthreads();
  const int segment = shared.segment;
  if (segment < 0) {
    if (threadIdx.x == 0) found(-1);
    return;
  }
  const int slice_begin = segment / WARPS * slice.stride, slice_end = min(slice_begin + slice.stride, vocab);
  const int begin = slice_begin + segment % WARPS * slice.segment, end = min(begin + slice.segment, slice_end);
  uint64_t target = shared.before;
  for (int base = begin; base < end; base += THREADS * 4) {  // in one turn but for vocabularies above 256K
    const int i = base + threadIdx.x * 4;
    float x[4] = {};
    if (reinterpret_cast<uintptr_t>(row + i) % 16 == 0 && i + 4 <= end) {
      LoadFloats(row + i, x);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (i + e < end) x[e] = row[i + e];
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = Positive(x[e]) >= threshold ? Positive(x[e]) : 0.f;
    const uint64_t mass = MassOf(Sum4(x[0], x[1], x[2], x[3]), emax);
    uint64_t before = mass, unused = 0;
    __syncthreads();
    BlockExclusive(before, unused, shared);
    const bool is_mine = target > before && target <= before + mass;
    if (is_mine) found(i + ColumnOf(x, target - before, emax));
    if (threadIdx.x == THREADS - 1) shared.before = before + mass;
    if (__syncthreads_or(is_mine)) return;
    target -= shared.before;
  }
}

__device__ __forceinline__ void SampleRow(const SampleParams& p, unsigned char* memory) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int64_t output = blockIdx.x / ptx::ClusterSize(), row = InputRow(p, output);
  const int vocab = int(p.vocab);
  const float* const input = p.input + row * p.row_stride;
  const Slice slice(reinterpret_cast<float*>(memory + sizeof(Shared)), vocab);
  slice.StartLoad(input, 0.f);
  const Asked asked = AskedOf(p.filter, row, output, vocab);
  Clear(shared);
  if (threadIdx.x == 0 && ptx::ClusterRank() == 0) {
    shared.random = RandomBits(ValueOf(p.random.seed, output), ValueOf(p.random.offset, output), output);
  }
  ptx::CopyWait<0>();
  Search<false> search{slice, asked, shared, vocab};
  search.Fill();
  ptx::ClusterSync();
  const Bracket bracket = search.Find();
  search.template Report<true>(bracket);
  ptx::ClusterSync();
  if (ptx::ClusterRank() != 0) return;
  const uint32_t threshold = search.template Decide<true>(bracket);
  __syncthreads();
  Draw(input, vocab, slice, FromBits(threshold), search.emax, shared,
       [&](int column) { WriteToken(p, output, column); });
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

template <typename Params>  // SampleParams; a template, so that only the unit that launches it compiles it
__global__ void __launch_bounds__(THREADS, BLOCKS) SampleKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char memory[];
  SampleRow(p, memory);
}

template <typename T, bool SIGNED>
__global__ void __launch_bounds__(THREADS, BLOCKS) RowsKernel(const __grid_constant__ RowParams<T> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  FilterRow<T, SIGNED>(p, memory);
}

}  // namespace held
}  // namespace sampling
}  // namespace flashinfer
