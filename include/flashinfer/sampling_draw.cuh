// SPDX-License-Identifier: Apache-2.0
// Draws of tokens from what top-k and top-p keep (definitions and parameters: sampling.h): probabilities that a cluster
// holds (sampling_filter.cuh) or a block reads once (sampling_list.cuh). The kernel here is for logits too, and
// for rows that neither can be done with: load the row, find the threshold, sum up masses, draw.
#pragma once
#include "sampling_filter.cuh"
#include "sampling_list_draw.cuh"
#include "sampling_select.cuh"

namespace flashinfer {
namespace sampling {

/// What a draw from a row needs besides its masses.
struct Ready {
  float threshold;
  int emax;
};

/// Load the slice and find the threshold of any filter.
template <bool RESIDENT>
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
    if (p.filter.filter == Filter::kBoth) total = TotalMass(shared, before);
  } else {
    largest = Positive(largest);
    ready.emax = BiasedExponent(largest);
  }
  if (p.filter.filter == Filter::kMinP) {
    ready.threshold = MinPThreshold(ValueOf(p.filter.top_p, p.filter.top_p_by_output ? output : row), largest);
  } else if (p.filter.filter != Filter::kNone) {
    const Limits limits = LimitsOf(p.filter, row, output, vocab, ready.emax, total);
    if (limits.AnyOf() && largest > 0.f) {
      const uint32_t key = FindThreshold<false>(slice, vocab, Bits(largest), ready.emax, limits.wanted,
                                                limits.top_k_first, limits.top_p, shared);
      ready.threshold = FromBits(key);
    }
  }
  return ready;
}

/// Draw from a row of probabilities that is read once; false where that cannot be done.
template <typename Random, typename F>
__device__ __forceinline__ bool DrawInOneRead(const SampleParams& p, int64_t row, int64_t output,
                                              const Slice<false>& slice, const Random& random, const F& found,
                                              Shared& shared) {
  Kept kept;
  const auto limits_of = [&](int emax) { return LimitsOf(p.filter, row, output, slice.size, emax, 0); };
  auto* const list = reinterpret_cast<Survivor*>(&shared + 1);
  const bool is_found = FindAmongSurvivors<false>(slice, limits_of, list, [](int) {}, shared, kept);
  __syncthreads();
  if (!is_found) return false;
  ptx::ClusterWait();
  DrawSurvivor(slice, kept, random(), found, shared);
  return true;
}

template <bool RESIDENT>
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
    if (p.filter.in_one_read && DrawInOneRead(p, row, output, slice, random, write, shared)) return;
  }
  const Ready ready = PrepareRow(p, row, output, slice, shared);
  if constexpr (!RESIDENT) {
    if (p.filter.in_one_read) {  // or not much more
      __syncthreads();
      DrawColumn(slice, ready.threshold, ready.emax, random(), write, shared);
      return;
    }
  }
  ShareMasses(slice, ready.threshold, ready.emax, shared);
  uint64_t before;
  const uint64_t total = TotalMass(shared, before);
  FindColumn(slice, ready.threshold, ready.emax, TargetOf(random(), total), before, total, shared, write);
}

}  // namespace sampling

template <bool SEARCH>
Status Sample(const SampleParams& p, Stream stream) {
  static_assert(SEARCH, "sampling_stream.cuh has the other one");
  using namespace sampling;
  if (p.is_logits) return LaunchRows<SampleKernel<true>, SampleKernel<false>>(p.batch, p.vocab, false, stream, p);
  return LaunchFilter<held::SampleKernel<SampleParams>, SampleKernel<false>, held::THREADS, sizeof(held::Shared)>(
      p.batch, p.vocab, false, stream, p, IsListed(p.filter, p.batch));
}

}  // namespace flashinfer
