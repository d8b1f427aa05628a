// SPDX-License-Identifier: Apache-2.0
// Verification of draft tokens (definitions and parameters: sampling.h), one cluster per request.
#pragma once
#include "../sampling.cuh"

namespace flashinfer {
namespace sampling {

template <bool RESIDENT>
__global__ void __launch_bounds__(Threads(RESIDENT), Blocks(RESIDENT))
    SpeculativeKernel(const __grid_constant__ SpeculativeParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  RowShared& shared = *reinterpret_cast<RowShared*>(memory);
  ptx::ClusterArrive();
  const int64_t request = blockIdx.x / ptx::ClusterSize();
  const int drafts = int(p.drafts), vocab = int(p.vocab);
  const bool is_first = ptx::ClusterRank() == 0;
  const uint64_t seed = ValueOf(p.random.seed, request), offset = ValueOf(p.random.offset, request);
  const float* const draft = p.draft_probs + request * drafts * p.vocab;
  const float* const target = p.target_probs + request * (drafts + 1) * p.vocab;
  const int32_t* const ids = p.draft_ids + request * drafts;

  // Every block finds the first rejected draft token.
  if (threadIdx.x == 0) shared.flag = drafts;
  __syncthreads();
  int passed = 0;
  for (int i = threadIdx.x; i < drafts; i += blockDim.x) {
    const int id = ids[i];
    bool accept = false;
    if (id >= 0 && id < vocab) {
      accept = RandomUnit(seed, offset + i, request) * draft[i * p.vocab + id] < target[i * p.vocab + id];
    }
    if (!accept) atomicMin(&shared.flag, i);
    passed += accept;
  }
  __syncthreads();
  const int position = shared.flag;
  if (is_first) {
    passed = int(WarpSum(uint64_t(passed)));
    if (threadIdx.x % 32 == 0 && passed != 0) atomicAdd(p.accepted + request, passed);
    if (threadIdx.x == 0) p.emitted[request] += position;
    int32_t* const out = p.out + request * (drafts + 1);
    for (int i = threadIdx.x; i <= drafts; i += blockDim.x) {
      if (i != position) out[i] = i < position ? ids[i] : -1;
    }
  }

  // The next token is sampled from the positive part of target - draft; if that is empty, from the target.
  const float* const wanted = target + position * p.vocab;
  const float* const drawn = draft + min(position, max(drafts - 1, 0)) * p.vocab;
  auto slice = SliceOf<RESIDENT>(wanted, vocab, reinterpret_cast<float*>(memory + sizeof(RowShared)), false);
  float largest = 0.f;
  for (int attempt = position < drafts ? 0 : 1; attempt < 2 && !(largest > 0.f); ++attempt) {
    const float* const minus = attempt == 0 ? drawn : nullptr;
    slice.minus = minus == nullptr ? nullptr : minus + slice.begin;
    largest = LoadSlice(
        slice, 0.f, [&](int i) { return minus == nullptr ? wanted[i] : wanted[i] - minus[i]; },
        [](int, float (&)[4]) {}, [](float x) { return x; });
    if (attempt == 1 && position < drafts)
      ptx::ClusterArrive();  // the first attempt has consumed the arrival at the start
    largest = Positive(ClusterMax(largest, shared));
  }
  const int emax = BiasedExponent(largest);
  ShareMasses(slice, 0.f, emax, shared);
  uint64_t before;
  const uint64_t total = TotalMass(shared, before);
  FindColumn(slice, 0.f, emax, TargetOf(RandomBits(seed, offset + drafts, request), total), before, total, shared,
             [&](int column) { p.out[request * (drafts + 1) + position] = max(column, 0); });
}

}  // namespace sampling

FLASHINFER_INLINE Status ChainSpeculativeSample(const SpeculativeParams& p, Stream stream) {
  using namespace sampling;
  if (p.batch == 0) return cudaSuccess;
  return LaunchRows<SpeculativeKernel<true>, SpeculativeKernel<false>>(p.batch, p.vocab, false, stream, p);
}

}  // namespace flashinfer
