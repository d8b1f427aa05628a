// SPDX-License-Identifier: Apache-2.0
// Mixture of experts: the stages between routed expert ids and the output, shared by both backends.
//   sort      (token, slot) pairs by local expert: sort.h
//   permute   rows of tokens in the order of experts, as the first operand of GEMM 1 (quantised where it has 8 bits)
//   GEMM 1    sums (pairs, fc1 rows)
//   activate  h = act(gate, up) of the sums times factors plus bias, as the first operand of GEMM 2
//   GEMM 2    sums (pairs, hidden)
//   finalize  out[t] = sum over slots, in order, of scale[t, s] * (sums * factors + bias)
// Defined in layer.cuh (CUDA) and cpu/layer.h (CPU); products: gemm.h, and cpu/product.h on the CPU.
//   test  pytest tests/fused_moe      bench  python benchmarks/bench_fused_moe.py
#pragma once
#include <limits>

#include "../gemm.h"
#include "../host_device.h"
#include "sort.h"

namespace flashinfer {
namespace fused_moe {

using gemm::Element;

/// Weights and the operands that multiply them.
enum class Format : int {
  kPlain,      // fp16 or bf16, both
  kFp8Tensor,  // e4m3, one factor per expert
  kFp8Block,   // e4m3, scales of 1 x 128 activations and 128 x 128 weights
  kMxfp4,      // e2m1 weights with a power of two per 32 along K, bf16 activations
  kInt4Fp8,    // int4 weights with a bf16 scale per 128 along K, e4m3 activations with a factor per column
  kMxfp4Fp8,   // e2m1 weights with an offset of the exponent per 32 along K, e4m3 activations with a factor per row
};

/// Numbers of flashinfer.ActivationType. Gated ones read two halves of the sums: [up ; gate].
enum class ActivationType : int {
  kGelu,
  kRelu,
  kSilu,
  kSwiglu,
  kGeglu,
  kSwigluBias,
  kRelu2,
  kSwigluStep,
  kGegluTanh,
  kIdentity,
  kSitu,
};

FLASHINFER_HD constexpr bool IsGated(ActivationType x) {
  return x == ActivationType::kSwiglu || x == ActivationType::kGeglu || x == ActivationType::kSwigluBias ||
         x == ActivationType::kSwigluStep || x == ActivationType::kGegluTanh || x == ActivationType::kSitu;
}

/// The activation and its constants, one fp32 per local expert; null means the default.
struct ActivationParams {
  ActivationType type = ActivationType::kSwiglu;
  const float* alpha = nullptr;             // SwigluBias, 1
  const float* beta = nullptr;              // SwigluBias, 0
  const float* limit = nullptr;             // SwigluBias, infinity; SwigluStep, 7
  const float* situ_beta = nullptr;         // Situ, 4
  const float* situ_linear_beta = nullptr;  // Situ, 25
};

/// Constants of one expert: alpha, beta and limit, or the two of Situ.
struct ActivationConstants {
  float a, b, limit;
};

FLASHINFER_HD ActivationConstants ConstantsOf(const ActivationParams& p, int expert) {
  constexpr float NO_LIMIT = std::numeric_limits<float>::infinity();
  const auto constant = [&](const float* values, float standard) {
    return values == nullptr ? standard : values[expert];
  };
  if (p.type == ActivationType::kSitu) {
    return {constant(p.situ_beta, 4.f), constant(p.situ_linear_beta, 25.f), 0.f};
  }
  const bool is_step = p.type == ActivationType::kSwigluStep;
  return {constant(p.alpha, 1.f), constant(p.beta, 0.f), constant(p.limit, is_step ? 7.f : NO_LIMIT)};
}

/// Pairs (token, slot) sorted by local expert, as sort.h writes them with align 1.
struct SortedPairs {
  const int32_t* experts;         // (tokens, top_k) global ids
  const int32_t* expert_offsets;  // (num_experts + 1,)
  const int32_t* pair_to_row;     // (tokens, top_k), negative: no local expert
  const int32_t* row_to_pair;     // (pairs,), negative: row not in use
  int64_t tokens;
  int32_t top_k, first_expert, num_experts;
  int32_t* tile_counters = nullptr;  // (2,) zeros, with which blocks of GEMMs 1 and 2 take tiles; or null
};

/// Rounding of a row to an operand.
enum class Rounding : int {
  kElement,  // to the 16-bit element
  kFactor,   // e4m3(x * factor), the factor of the expert or of all experts
  kBlocks,   // e4m3(x * q) with q = 448 / amax of 128 columns, after rounding to bf16; scales 1 / q
  kColumns,  // e4m3(x * column_factors[column]); null: 1
  kRows,     // e4m3(x * q) with q = 448 / amax of the row; scales 1 / q
};

/// First operand of a product: (rows, columns), contiguous. With kColumns, `element` may be bf16: the e4m3 numbers are stored
/// as bf16.
struct Operand {
  void* data;
  Element element;
  Rounding rounding;
  int64_t columns;
  const float* factor;               // kFactor
  bool is_factor_of_expert;          // kFactor: one per expert
  const bfloat16_t* column_factors;  // kColumns
  float* scales;                     // kBlocks: (columns / 128, rows) with scale_stride between blocks; kRows: (rows,)
  int64_t scale_stride;
};

/// Result of a product, (rows, columns) contiguous: value = sum * expert_factor[e] * row_factor[row] + bias[e][column].
struct Sums {
  void* data;
  Element element;
  int64_t columns;
  const float* expert_factor;  // or null
  const float* row_factor;     // or null
  const void* bias;            // (num_experts, columns) or null
  Element bias_element;
};

struct PermuteParams {
  const void* input;  // (tokens, columns)
  Element element;
  int64_t input_stride;
  SortedPairs pairs;
  Operand output;
  bool enable_pdl;
};
struct ActivateParams {
  Sums sums;
  ActivationParams activation;
  SortedPairs pairs;
  Operand output;
  bool enable_pdl;
};
struct FinalizeParams {
  Sums sums;
  SortedPairs pairs;
  const float* scales;  // (tokens, top_k) or null = 1
  void* output;         // (tokens, columns)
  Element element;
  int64_t output_stride;
  bool enable_pdl;
};

constexpr int64_t FEW_PAIRS = 1024, FEW_EXPERTS = 512;  // what SortAndPermute takes at most

/// Return true if SortAndPermute serves a layer: few pairs, experts whose counters fit in 48 KB, no scale of whole rows.
inline bool SupportsOneLaunch(int64_t pairs, int64_t num_experts, Rounding rounding) {
  return pairs <= FEW_PAIRS && num_experts <= FEW_EXPERTS &&
         (rounding == Rounding::kElement || rounding == Rounding::kBlocks);
}

Status Permute(const PermuteParams& params, Stream stream);
/// Sort the pairs of a layer that SupportsOneLaunch, and permute their rows. CUDA only, sort_permute.cuh.
Status SortAndPermute(const MoeSortParams& sort, const PermuteParams& params, Stream stream);
/// Quantise each token once, by blocks of 128 columns, to row t of the output, for a GEMM 1 that gathers its rows. Rows of
/// the input are aligned to 16 bytes and have whole blocks. CUDA only.
Status QuantizeTokens(const PermuteParams& params, Stream stream);
Status Activate(const ActivateParams& params, Stream stream);
Status Finalize(const FinalizeParams& params, Stream stream);

}  // namespace fused_moe
}  // namespace flashinfer
