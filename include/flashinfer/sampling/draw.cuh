// SPDX-License-Identifier: Apache-2.0
// Draws of tokens from what top-k and top-p keep of logits (definitions and parameters: sampling.h): load the row, find
// the threshold, sum up masses, draw. Rows that no cluster can hold: draw_long.cuh. Probabilities are drawn
// from in top.cuh.
#pragma once
#include "../sampling.cuh"
#include "select.cuh"

namespace flashinfer {
namespace sampling {

/// Whether a draw adds up quanta of columns, not masses.
__device__ __forceinline__ bool IsByColumn(const SampleParams& p) {
  return !p.is_logits && (p.filter.filter == Filter::kBoth || p.filter.filter == Filter::kTopKFirst);
}

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
    ready.emax = IsByColumn(p) ? ExponentOfProbs(largest) : BiasedExponent(largest);
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

template <bool RESIDENT>
__global__ void __launch_bounds__(Threads(RESIDENT), Blocks(RESIDENT))
    SampleKernel(const __grid_constant__ SampleParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  ptx::ClusterArrive();
  ptx::GridDependencyWait();
  const int64_t output = blockIdx.x / ptx::ClusterSize(), row = InputRow(p, output);
  const float* const input = p.input + row * p.row_stride;
  auto slice = SliceOf<RESIDENT>(input, int(p.vocab), reinterpret_cast<float*>(memory + sizeof(Shared)),
                                 reinterpret_cast<uintptr_t>(input) % 16 == 0);
  const auto random = [&] {
    return RandomBits(ValueOf(p.random.seed, output), ValueOf(p.random.offset, output), output);
  };
  const auto write = [&](int column) { WriteToken(p, output, column); };
  const Ready ready = PrepareRow(p, row, output, slice, shared);
  ShareMasses(slice, ready.threshold, ready.emax, shared);
  uint64_t before;
  const uint64_t total = TotalMass(shared, before);
  FindColumn(slice, ready.threshold, ready.emax, TargetOf(random(), total), before, total, shared, write);
}

}  // namespace sampling

/// Draws where no cluster can hold a row (draw_long.cuh).
FLASHINFER_INLINE Status SampleLong(const SampleParams& params, Stream stream);

template <bool SEARCH>
Status Sample(const SampleParams& p, Stream stream) {
  static_assert(SEARCH, "stream.cuh has the other one");
  using namespace sampling;
  cudaError_t status;
  const Device& device = Device::Current(status);
  if (status != cudaSuccess) return status;
  bool has_cluster_code = false;
  status = PrepareKernel<SampleKernel<true>>(device, has_cluster_code);
  if (status != cudaSuccess) return status;
  const Geometry g = GeometryOf(p.batch, p.vocab, device, has_cluster_code);
  return g.is_resident ? LaunchClusters(SampleKernel<true>, g, p.batch, p.enable_pdl, stream, p)
                       : SampleLong(p, stream);
}

}  // namespace flashinfer
