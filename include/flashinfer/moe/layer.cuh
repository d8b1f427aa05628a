// SPDX-License-Identifier: Apache-2.0
// The stages of a mixture of experts around its products, on CUDA; parameters in layer.h. All are bound by memory.
// Grids cover all pairs; a block of a row that is not in use returns, so that the host never waits for counts.
//   test  pytest tests/fused_moe      bench  python benchmarks/bench_fused_moe.py
#pragma once
#include "activate.cuh"
#include "rows.cuh"
#include "../quantize_1x128.cuh"
#include "../ptx/pdl.cuh"

namespace flashinfer {
namespace fused_moe {

__device__ __forceinline__ int ExpertOf(const SortedPairs& p, int64_t pair) { return p.experts[pair] - p.first_expert; }

/// A block reads (and quantises) its token once and writes it to the rows of all its experts.
template <typename In, Rounding ROUNDING>
__global__ void __launch_bounds__(ROW_THREADS) PermuteKernel(const __grid_constant__ PermuteParams p) {
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int64_t token = blockIdx.x;
  const int32_t* const rows = p.pairs.pair_to_row + token * p.pairs.top_k;
  PermuteToken<In, ROUNDING>(p, token, [&](const auto& write) {
#pragma unroll 4
    for (int slot = 0; slot < p.pairs.top_k; ++slot) {
      if (rows[slot] >= 0) write(rows[slot]);
    }
  });
}

/// Kernel: PermuteKernel<__nv_bfloat16, kBlocks> with loads of 32 bytes and stores of 16 bytes per lane, for columns that
/// are whole blocks of 128. 8 lanes quantise a block, as in quantize_1x128.cuh.
template <int LANES>
__global__ void __launch_bounds__(ROW_THREADS) PermuteBlocksKernel(const __grid_constant__ PermuteParams p) {
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x % LANES, block = (blockIdx.y * ROW_THREADS + threadIdx.x) / LANES;
  const bool has_block = block < int(p.output.columns) / WARP_COLUMNS;  // no early exit: lanes of a warp share shuffles
  const int column = block * WARP_COLUMNS + lane * 16;
  uint4 raw[2] = {};
  if (has_block) {
    const auto* const from = static_cast<const bfloat16_t*>(p.input) + token * p.input_stride + column;
    raw[0] = *reinterpret_cast<const uint4*>(from), raw[1] = *reinterpret_cast<const uint4*>(from + 8);
  }
  float amax = gemm::AbsMax16<bfloat16_t>(raw);
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, offset));
  if (!has_block) return;
  const float q = amax == 0.f ? 1.f : 448.f / amax;
  const uint2 low = gemm::Encode8(reinterpret_cast<const bfloat16_t(&)[8]>(raw[0]), q);
  const uint2 high = gemm::Encode8(reinterpret_cast<const bfloat16_t(&)[8]>(raw[1]), q);
  const int32_t* const rows = p.pairs.pair_to_row + token * p.pairs.top_k;
#pragma unroll 8
  for (int slot = 0; slot < p.pairs.top_k; ++slot) {
    const int64_t row = rows[slot];
    if (row < 0) continue;
    *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.output.data) + row * p.output.columns + column) =
        uint4{low.x, low.y, high.x, high.y};
    if (lane == 0) p.output.scales[block * p.output.scale_stride + row] = 1.f / q;
  }
}

/// Read values of sums: times the factor, plus the bias.
template <typename T, int COUNT>
__device__ __forceinline__ void ReadSums(const Sums& s, int64_t row, int expert, float factor, int column,
                                         float (&x)[COUNT]) {
  LoadFloats<T>(s.data, row * s.columns + column, x);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) x[i] *= factor;
  if (s.bias == nullptr) return;
  float bias[COUNT];
  if (s.bias_element == Element::kBFloat16) {
    LoadFloats<__nv_bfloat16>(s.bias, expert * s.columns + column, bias);
  } else {
    LoadFloats<__half>(s.bias, expert * s.columns + column, bias);
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) x[i] += bias[i];
}

__device__ __forceinline__ float FactorOf(const Sums& s, int64_t row, int expert) {
  const float factor = s.expert_factor == nullptr ? 1.f : s.expert_factor[expert];
  return s.row_factor == nullptr ? factor : factor * s.row_factor[row];
}

template <typename In, typename Out, Rounding ROUNDING>
__global__ void __launch_bounds__(ROW_THREADS) ActivateKernel(const __grid_constant__ ActivateParams p) {
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int64_t row = blockIdx.x;
  const int pair = p.pairs.row_to_pair[row];
  if (pair < 0) return;
  const int expert = ExpertOf(p.pairs, pair), columns = int(p.output.columns);
  const bool is_gated = p.sums.columns != columns;
  const ActivationConstants constants = ConstantsOf(p.activation, expert);
  const float factor = FactorOf(p.sums, row, expert);
  const auto this_row = [&](const auto& write) { write(row); };
  WriteRows<ROUNDING, Out>(p.output, this_row, expert, [&](int column, float (&x)[4]) {
    float up[4] = {};
    ReadSums<In>(p.sums, row, expert, factor, is_gated ? columns + column : column, x);
    if (is_gated) ReadSums<In>(p.sums, row, expert, factor, column, up);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = ActivateValue(p.activation.type, constants, x[i], up[i]);
  });
}

constexpr int FINALIZE_THREADS = 128;

template <typename In>
constexpr int FINALIZE_COLUMNS = 16 / int(sizeof(In));  // columns per thread; hidden sizes are multiples of 8

/// A thread sums 16 bytes of columns of a token over its slots, in their order.
template <typename In, typename Out>
__global__ void __launch_bounds__(FINALIZE_THREADS) FinalizeKernel(const __grid_constant__ FinalizeParams p) {
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int64_t token = blockIdx.x;
  constexpr int COLUMNS = FINALIZE_COLUMNS<In>;
  const int column = (blockIdx.y * FINALIZE_THREADS + threadIdx.x) * COLUMNS;
  if (column >= p.sums.columns) return;
  float total[COLUMNS] = {};
#pragma unroll 8
  for (int slot = 0; slot < p.pairs.top_k; ++slot) {
    const int64_t pair = token * p.pairs.top_k + slot, row = p.pairs.pair_to_row[pair];
    if (row < 0) continue;
    const int expert = ExpertOf(p.pairs, pair);
    float x[COLUMNS];
    ReadSums<In>(p.sums, row, expert, FactorOf(p.sums, row, expert), column, x);
    const float scale = p.scales == nullptr ? 1.f : p.scales[pair];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) total[i] += x[i] * scale;
  }
  Out* const to = static_cast<Out*>(p.output) + token * p.output_stride + column;
  const auto rounded = RoundTo<Out, COLUMNS>(total);
  if (p.output_stride % COLUMNS == 0) {
    rounded.Store(to);
  } else {
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) to[i] = rounded.data[i];
  }
}

FLASHINFER_INLINE Status Permute(const PermuteParams& p, Stream stream) {
  const dim3 grid(unsigned(p.pairs.tokens), PermuteBlocks(p));
  const auto launch = [&](auto kernel) { return Launch(kernel, grid, dim3(ROW_THREADS), p.enable_pdl, stream, p); };
  const bool is_bf16 = p.element == Element::kBFloat16;
  switch (p.output.rounding) {
    case Rounding::kElement:
      return launch(p.element == Element::kE4M3 ? PermuteKernel<uint8_t, Rounding::kElement>
                                                : PermuteKernel<uint16_t, Rounding::kElement>);
    case Rounding::kBlocks: {
      constexpr int LANES = 8;
      const int64_t blocks = CeilDiv(p.output.columns / WARP_COLUMNS, int64_t{ROW_THREADS / LANES});
      if (p.output.columns % WARP_COLUMNS == 0 && p.input_stride % 8 == 0 && IsAligned(p.input, 16)) {
        return Launch(PermuteBlocksKernel<LANES>, dim3(unsigned(p.pairs.tokens), unsigned(blocks)), dim3(ROW_THREADS),
                      p.enable_pdl, stream, p);
      }
      return launch(PermuteKernel<__nv_bfloat16, Rounding::kBlocks>);
    }
    case Rounding::kColumns:
      return launch(is_bf16 ? PermuteKernel<__nv_bfloat16, Rounding::kColumns>
                            : PermuteKernel<__half, Rounding::kColumns>);
    case Rounding::kRows:
      return launch(is_bf16 ? PermuteKernel<__nv_bfloat16, Rounding::kRows> : PermuteKernel<__half, Rounding::kRows>);
    default:
      return cudaErrorInvalidValue;
  }
}

FLASHINFER_INLINE Status QuantizeTokens(const PermuteParams& p, Stream stream) {
  const int64_t columns = p.output.columns;
  if (p.output.rounding != Rounding::kBlocks || columns % WARP_COLUMNS != 0) return cudaErrorInvalidValue;
  return gemm::Quantize1x128<bfloat16_t>(
      {p.input, p.input_stride, static_cast<uint8_t*>(p.output.data), columns, p.output.scales, p.output.scale_stride,
       p.pairs.tokens, int(columns / WARP_COLUMNS), p.enable_pdl},
      stream);
}

template <typename In>
Status ActivateFrom(const ActivateParams& p, Stream stream) {
  const auto launch = [&](auto kernel) {
    const dim3 grid(unsigned(p.pairs.tokens * p.pairs.top_k), RowBlocks(p.output));
    return Launch(kernel, grid, dim3(ROW_THREADS), p.enable_pdl, stream, p);
  };
  using Bf16 = __nv_bfloat16;
  switch (p.output.rounding) {
    case Rounding::kElement:
      return launch(p.output.element == Element::kBFloat16 ? ActivateKernel<In, Bf16, Rounding::kElement>
                                                           : ActivateKernel<In, __half, Rounding::kElement>);
    case Rounding::kFactor:
      return launch(ActivateKernel<In, Bf16, Rounding::kFactor>);
    case Rounding::kBlocks:
      return launch(ActivateKernel<In, Bf16, Rounding::kBlocks>);
    case Rounding::kColumns:
      return launch(ActivateKernel<In, Bf16, Rounding::kColumns>);
    default:
      return launch(ActivateKernel<In, Bf16, Rounding::kRows>);
  }
}

FLASHINFER_INLINE Status Activate(const ActivateParams& p, Stream stream) {
  if (p.sums.element == Element::kFloat32) return ActivateFrom<float>(p, stream);
  return ActivateFrom<__nv_bfloat16>(p, stream);
}

FLASHINFER_INLINE Status Finalize(const FinalizeParams& p, Stream stream) {
  const auto launch = [&](auto kernel, int columns) {
    const dim3 grid(unsigned(p.pairs.tokens), unsigned(CeilDiv(p.sums.columns, FINALIZE_THREADS * columns)));
    return Launch(kernel, grid, dim3(FINALIZE_THREADS), p.enable_pdl, stream, p);
  };
  const bool is_bf16 = p.element == Element::kBFloat16;
  if (p.sums.element == Element::kFloat32) {
    return launch(is_bf16 ? FinalizeKernel<float, __nv_bfloat16> : FinalizeKernel<float, __half>,
                  FINALIZE_COLUMNS<float>);
  }
  if (p.sums.element != p.element) return cudaErrorInvalidValue;
  return launch(is_bf16 ? FinalizeKernel<__nv_bfloat16, __nv_bfloat16> : FinalizeKernel<__half, __half>,
                FINALIZE_COLUMNS<__half>);
}

}  // namespace fused_moe
}  // namespace flashinfer
