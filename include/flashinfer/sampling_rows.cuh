// SPDX-License-Identifier: Apache-2.0
// Kernels that write what top-k and top-p keep of rows: renormalisation, masks (definitions and parameters:
// sampling.h). Many rows are read once, a block each; few are held by clusters (sampling_filter.cuh).
#pragma once
#include "sampling_filter.cuh"
#include "sampling_list.cuh"
#include "sampling_select.cuh"

namespace flashinfer {
namespace sampling {

enum class RowOp { kRenorm, kMaskLogits };

/// Write what is not kept while the row is read, then what is kept; false where that cannot be done.
template <typename T, RowOp OP>
__device__ __forceinline__ bool WriteInOneRead(const RowParams<T>& p, int64_t row, const Slice<false, T>& slice,
                                               Shared& shared) {
  constexpr bool SIGNED = OP == RowOp::kMaskLogits;
  T* const out = p.out + row * p.out_stride;
  const bool vectorised = reinterpret_cast<uintptr_t>(out) % sizeof(Vec<T, 4>) == 0;
  const auto limits_of = [&](int emax) {
    Limits limits = LimitsOf(p.filter, row, row, slice.size, emax, 0);
    if (SIGNED) limits.wanted.quanta = UNLIMITED;
    return limits;
  };
  const float rest = SIGNED ? -INFINITY : 0.f;
  const auto clear = [&](int i) {
    if (vectorised && i + 4 <= slice.size) {
      const float x[4] = {rest, rest, rest, rest};
      RoundTo<T, 4>(x).Store(out + i);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (i + j < slice.size) out[i + j] = FromFloat<T>(rest);
      }
    }
  };
  Kept kept;
  auto* const list = reinterpret_cast<Survivor*>(&shared + 1);
  const bool is_found = FindAmongSurvivors<SIGNED>(slice, limits_of, list, clear, shared, kept);
  __syncthreads();
  if (!is_found) return false;
  ptx::ClusterWait();  // for the arrival at the start
  ptx::LaunchDependents();
  float normaliser = 1.f;
  const Scale scale(kept.emax);
  if constexpr (!SIGNED) {
    uint64_t total = 0;
    ForEachMass(kept, [&](int, uint64_t mass) { total += mass; });
    total = WarpSum(total);
    if (threadIdx.x % 32 == 0) shared.scratch[0][threadIdx.x / 32] = total;
    __syncthreads();
    total = 0;
    for (int w = 0; w < int(blockDim.x) / 32; ++w) total += shared.scratch[0][w];
    normaliser = total == 0 ? 0.f : 512.f / __ull2float_rn(total);
  }
  for (int i = threadIdx.x; i < kept.survivors.count; i += blockDim.x) {
    const Survivor survivor = list[i];
    if (survivor.key < kept.threshold) continue;
    const float value = KeyValue<SIGNED>(survivor.key);
    out[survivor.column] = FromFloat<T>(SIGNED ? value : scale(value) * normaliser);
  }
  return true;
}

template <typename T, RowOp OP>
__global__ void __launch_bounds__(Threads(false), Blocks(false)) RowsKernel(const __grid_constant__ RowParams<T> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  ptx::ClusterArrive();
  ptx::GridDependencyWait();
  const int64_t row = blockIdx.x / ptx::ClusterSize();
  const int vocab = int(p.vocab);
  const T* const input = p.input + row * p.input_stride;
  auto slice = SliceOf<false>(input, vocab, nullptr, reinterpret_cast<uintptr_t>(input) % sizeof(Vec<T, 4>) == 0);
  if (p.filter.in_one_read && WriteInOneRead<T, OP>(p, row, slice, shared)) return;
  float largest = LoadSlice(
      slice, OP == RowOp::kRenorm ? 0.f : -INFINITY, [&](int i) { return ToFloat(input[i]); },
      [&](int i, float (&x)[4]) {
        const auto v = Vec<T, 4>::Load(input + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = ToFloat(v[j]);
      },
      [](float x) { return x; });
  ptx::LaunchDependents();
  largest = ClusterMax(largest, shared);

  uint32_t threshold = 0;
  int emax = ONE;
  float normaliser = 1.f;
  Scale scale(ONE);
  if constexpr (OP == RowOp::kRenorm) {
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
  if constexpr (OP == RowOp::kRenorm) {
    ShareMasses(slice, FromBits(threshold), emax, shared);
    uint64_t before;
    const uint64_t total = TotalMass(shared, before);
    // 2^40 is the mass of 1; a scaled weight is 2^31 times what its mass is relative to.
    normaliser = total == 0 ? 0.f : 512.f / __ull2float_rn(total);
  }

  T* const out = p.out + row * p.out_stride + slice.begin;
  const bool vectorised = reinterpret_cast<uintptr_t>(out) % sizeof(Vec<T, 4>) == 0;
  slice.ForEachGroup([&](int i, float (&x)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (OP == RowOp::kMaskLogits) {
        x[j] = OrderedKey(x[j]) >= threshold ? x[j] : -INFINITY;
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
Status RenormRows(const RowParams<T>& p, Stream stream) {
  using namespace sampling;
  return LaunchFilter<held::RowsKernel<T, false>, RowsKernel<T, RowOp::kRenorm>, held::THREADS, sizeof(held::Shared)>(
      p.rows, p.vocab, p.enable_pdl, stream, p, p.out != p.input && IsListed(p.filter, p.rows));
}

template <typename T>
Status MaskRows(const RowParams<T>& p, Stream stream) {
  using namespace sampling;
  return LaunchFilter<held::RowsKernel<T, true>, RowsKernel<T, RowOp::kMaskLogits>, held::THREADS,
                      sizeof(held::Shared)>(p.rows, p.vocab, p.enable_pdl, stream, p,
                                            p.out != p.input && IsListed(p.filter, p.rows));
}

}  // namespace flashinfer
