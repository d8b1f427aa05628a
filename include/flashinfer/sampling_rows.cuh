// SPDX-License-Identifier: Apache-2.0
// Kernels that write rows: softmax, renormalisation, masks (definitions and parameters: sampling.h). A cluster per row.
#pragma once
#include "sampling.cuh"

namespace flashinfer {
namespace sampling {

enum class RowOp { kSoftmax, kRenorm, kMaskLogits };

template <typename T, RowOp OP, bool RESIDENT>
__global__ void __launch_bounds__(Threads(RESIDENT), Blocks(RESIDENT))
    RowsKernel(const __grid_constant__ RowParams<T> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  ptx::ClusterArrive();
  ptx::GridDependencyWait();
  const int64_t row = blockIdx.x / ptx::ClusterSize();
  const int vocab = int(p.vocab);
  const T* const input = p.input + row * p.input_stride;
  auto slice = SliceOf<RESIDENT>(input, vocab, reinterpret_cast<float*>(memory + sizeof(Shared)),
                                 reinterpret_cast<uintptr_t>(input) % sizeof(Vec<T, 4>) == 0);
  float factor = 1.f;
  if (OP == RowOp::kSoftmax) factor = FactorOf(ValueOf(p.temperature, row));
  float largest = LoadSlice(
      slice, OP == RowOp::kRenorm ? 0.f : -INFINITY, [&](int i) { return ToFloat(input[i]); },
      [&](int i, float (&x)[4]) {
        const auto v = Vec<T, 4>::Load(input + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = ToFloat(v[j]);
      },
      [&](float x) { return x * factor; });
  ptx::LaunchDependents();
  largest = ClusterMax(largest, shared);

  uint32_t threshold = 0;
  int emax = ONE;
  float normaliser = 1.f;
  Scale scale(ONE);
  if constexpr (OP == RowOp::kSoftmax) {
    ExponentiateAndShare(slice, factor, largest, shared);
  } else if constexpr (OP == RowOp::kRenorm) {
    largest = Positive(largest);
    emax = BiasedExponent(largest);
    scale = Scale(emax);
    const Limits limits = LimitsOf(p.filter, row, row, vocab, emax, 0);
    if (limits.AnyOf() && largest > 0.f) {
      threshold = FindThreshold<false>(slice, vocab, Bits(largest), emax, limits.wanted, limits.top_k_first,
                                       limits.top_p, shared);
    }
  } else {
    const Limits limits = LimitsOf(p.filter, row, row, vocab, emax, 0);
    if (limits.wanted.count != ~uint32_t{0}) {
      const Wanted wanted{limits.wanted.count, UNLIMITED};
      threshold = FindThreshold<true>(slice, vocab, OrderedKey(largest), emax, wanted, false, 1.f, shared);
    }
  }
  if constexpr (OP == RowOp::kRenorm) ShareMasses(slice, FromBits(threshold), emax, shared);
  if constexpr (OP != RowOp::kMaskLogits) {
    uint64_t before;
    const uint64_t total = TotalMass(shared, before);
    // 2^40 is the mass of 1; a scaled weight is 2^31 times what its mass is relative to.
    const float one = OP == RowOp::kSoftmax ? 1099511627776.f : 512.f;
    normaliser = total == 0 ? 0.f : one / __ull2float_rn(total);
  }

  T* const out = p.out + row * p.out_stride + slice.begin;
  const bool vectorised = reinterpret_cast<uintptr_t>(out) % sizeof(Vec<T, 4>) == 0;
  slice.ForEachGroup([&](int i, float (&x)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (OP == RowOp::kMaskLogits) {
        x[j] = OrderedKey(x[j]) >= threshold ? x[j] : -INFINITY;
      } else if constexpr (OP == RowOp::kSoftmax) {
        const float weight = RESIDENT ? x[j] : ExpWeight(x[j], factor, slice.shift);
        x[j] = weight * normaliser;  // NaN stays NaN
      } else {
        const float weight = Positive(x[j]);
        x[j] = Bits(weight) >= threshold ? scale(weight) * normaliser : 0.f;
      }
    }
    if (vectorised && i + 4 <= slice.size) {
      RoundTo<T, 4>(x).Store(out + i);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (i + j < slice.size) out[i + j] = FromFloat<T>(x[j]);
      }
    }
  });
}

}  // namespace sampling

template <typename T>
Status SoftmaxRows(const RowParams<T>& p, Stream stream) {
  using namespace sampling;
  return LaunchRows<RowsKernel<T, RowOp::kSoftmax, true>, RowsKernel<T, RowOp::kSoftmax, false>>(
      p.rows, p.vocab, p.enable_pdl, stream, p);
}

template <typename T>
Status RenormRows(const RowParams<T>& p, Stream stream) {
  using namespace sampling;
  return LaunchRows<RowsKernel<T, RowOp::kRenorm, true>, RowsKernel<T, RowOp::kRenorm, false>>(p.rows, p.vocab,
                                                                                               p.enable_pdl, stream, p);
}

template <typename T>
Status MaskRows(const RowParams<T>& p, Stream stream) {
  using namespace sampling;
  return LaunchRows<RowsKernel<T, RowOp::kMaskLogits, true>, RowsKernel<T, RowOp::kMaskLogits, false>>(
      p.rows, p.vocab, p.enable_pdl, stream, p);
}

}  // namespace flashinfer
