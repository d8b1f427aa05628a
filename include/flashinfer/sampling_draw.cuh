// SPDX-License-Identifier: Apache-2.0
// The kernel that draws a token for each output (definitions and parameters: sampling.h), a cluster for each: load
// the row, find the threshold, sum up masses, draw.
#pragma once
#include "sampling_list.cuh"

namespace flashinfer {
namespace sampling {

__device__ __forceinline__ int64_t InputRow(const SampleParams& p, int64_t output) {
  if (p.indices == nullptr) return output;
  const int64_t row =
      p.wide ? static_cast<const int64_t*>(p.indices)[output] : static_cast<const int32_t*>(p.indices)[output];
  return min(max(row, int64_t{0}), p.rows - 1);  // an index out of range reads a wrong row, not memory of others
}

__device__ __forceinline__ void WriteToken(const SampleParams& p, int64_t output, int column) {
  const int token = max(column, 0);
  if (p.wide) {
    static_cast<int64_t*>(p.out)[output] = token;
  } else {
    static_cast<int32_t*>(p.out)[output] = token;
  }
  if (p.valid != nullptr) p.valid[output] = column >= 0;
}

/// What a draw from a row needs besides its masses.
struct Ready {
  float threshold;
  int emax;
};

/// Load the slice and find the threshold.
template <bool SEARCH, bool RESIDENT>
__device__ __forceinline__ Ready PrepareRow(const SampleParams& p, int64_t row, int64_t output, Slice<RESIDENT>& slice,
                                            Shared& shared) {
  const int vocab = int(p.vocab);
  const float* const input = p.input + row * p.row_stride;
  const bool needs_largest = p.is_logits || p.filter.filter != Filter::kNone;
  float largest = -INFINITY;
  if (RESIDENT || needs_largest) {
    largest = LoadSlice(
        slice, p.is_logits ? -INFINITY : 0.f, [&](int i) { return input[i]; },
        [&](int i, float (&x)[4]) { LoadFloats(input + i, x); }, [](float x) { return x; });
  }
  Ready ready{0.f, ONE};
  if (!needs_largest) {
    ptx::ClusterWait();
    __syncthreads();
    return ready;
  }
  largest = ClusterMax(largest, shared);
  uint64_t total = 0;
  if (p.is_logits) {
    ExponentiateAndShare(slice, 1.f, largest, shared);
    largest = 1.f;
    uint64_t before;
    if (SEARCH && p.filter.filter == Filter::kBoth) total = TotalMass(shared, before);
  } else {
    largest = Positive(largest);
    ready.emax = BiasedExponent(largest);
  }
  if (p.filter.filter == Filter::kMinP) {
    ready.threshold = MinPThreshold(ValueOf(p.filter.top_p, p.filter.top_p_by_output ? output : row), largest);
  }
  if constexpr (SEARCH) {
    if (p.filter.filter == Filter::kBoth || p.filter.filter == Filter::kTopKFirst) {
      const Limits limits = LimitsOf(p.filter, row, output, vocab, ready.emax, total);
      if (limits.AnyOf() && largest > 0.f) {
        const uint32_t key = FindThreshold<false>(slice, vocab, Bits(largest), ready.emax, limits.wanted,
                                                  limits.top_k_first, limits.top_p, shared);
        ready.threshold = FromBits(key);
      }
    }
  }
  return ready;
}

/// Draw from a row of probabilities that is read once; false where that cannot be done.
template <bool SEARCH, typename Random, typename F>
__device__ __forceinline__ bool DrawInOneRead(const SampleParams& p, int64_t row, int64_t output,
                                              const Slice<false>& slice, const Random& random, const F& found,
                                              Shared& shared) {
  if (!SEARCH && p.filter.filter == Filter::kNone) {
    ptx::ClusterWait();  // for the arrival at the start
    DrawColumn(slice, 0.f, ONE, random(), true, found, shared);
    return true;
  }
  Kept kept;
  const float min_p = SEARCH ? 0.f : ValueOf(p.filter.top_p, p.filter.top_p_by_output ? output : row);
  const auto limits_of = [&](int emax) { return LimitsOf(p.filter, row, output, slice.size, emax, 0); };
  auto* const list = reinterpret_cast<Survivor*>(&shared + 1);
  const bool is_found = FindAmongSurvivors<false, SEARCH>(slice, min_p, limits_of, list, [](int) {}, shared, kept);
  __syncthreads();
  if (!is_found) return false;
  ptx::ClusterWait();
  DrawSurvivor(slice, kept, random(), found, shared);
  return true;
}

template <bool SEARCH, bool RESIDENT>
__global__ void __launch_bounds__(Threads(RESIDENT), Blocks(RESIDENT))
    SampleKernel(const __grid_constant__ SampleParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  ptx::ClusterArrive();
  const int64_t output = blockIdx.x / ptx::ClusterSize(), row = InputRow(p, output);
  const float* const input = p.input + row * p.row_stride;
  auto slice = SliceOf<RESIDENT>(input, int(p.vocab), reinterpret_cast<float*>(memory + sizeof(Shared)),
                                 reinterpret_cast<uintptr_t>(input) % 16 == 0);
  const auto random = [&] {
    return RandomBits(ValueOf(p.random.seed, output), ValueOf(p.random.offset, output), output);
  };
  const auto write = [&](int column) { WriteToken(p, output, column); };
  if constexpr (!RESIDENT) {
    if (p.filter.in_one_read && DrawInOneRead<SEARCH>(p, row, output, slice, random, write, shared)) return;
  }
  const Ready ready = PrepareRow<SEARCH>(p, row, output, slice, shared);
  if constexpr (!RESIDENT) {
    if (p.filter.in_one_read) {  // or not much more
      __syncthreads();
      DrawColumn(slice, ready.threshold, ready.emax, random(), false, write, shared);
      return;
    }
  }
  // Of logits without a filter, the masses have been shared.
  if (!p.is_logits || p.filter.filter != Filter::kNone) ShareMasses(slice, ready.threshold, ready.emax, shared);
  uint64_t before;
  const uint64_t total = TotalMass(shared, before);
  const bool is_plain = p.filter.filter == Filter::kNone && !p.is_logits;
  const uint64_t target = TargetOf(random(), is_plain ? MASS_OF_ONE : total);
  FindColumn(slice, ready.threshold, ready.emax, target, before, total, shared, write);
}

}  // namespace sampling

template <bool SEARCH>
Status Sample(const SampleParams& p, Stream stream) {
  using namespace sampling;
  if (p.batch == 0) return cudaSuccess;
  // Few rows without a filter are faster held by clusters.
  const bool in_one_read =
      !p.is_logits && (p.filter.filter == Filter::kNone ? p.batch >= 32 : IsListed(p.filter, p.batch));
  return LaunchFilter<SampleKernel<SEARCH, true>, SampleKernel<SEARCH, false>>(p.batch, p.vocab, false, stream, p,
                                                                               in_one_read);
}

}  // namespace flashinfer
