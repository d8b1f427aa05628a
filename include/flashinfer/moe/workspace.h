// SPDX-License-Identifier: Apache-2.0
// Memory of a mixture of experts between its stages, in one buffer. Rows of tokens and sums of GEMM 1 are dead when
// GEMM 2 runs, whose sums take their place.
#pragma once
#include <algorithm>

#include "layer.h"
#include "sort.h"

namespace flashinfer {
namespace fused_moe {

/// Sizes of a layer, from which the layout of its workspace follows.
struct LayerSizes {
  int64_t tokens, top_k, hidden, intermediate, num_experts;  // experts of this rank
  Format format;
  bool is_gated;
  Element sums1, sums2;   // element types of the sums of both products
  bool has_sums1 = true;  // false: GEMM 1 applies the activation
  bool has_wide_codes =
      false;          // operands of e4m3 numbers are bf16, as the products with int4 weights on CUDA take them
  int64_t ranks = 1;  // ranks that share the experts of the pairs
  int64_t pairs() const { return tokens * top_k; }
  /// Return how many pairs are expected to have an expert of this rank.
  int64_t expected_pairs() const { return (pairs() + ranks - 1) / ranks; }
  int64_t fc1_rows() const { return is_gated ? 2 * intermediate : intermediate; }
};

/// Offsets in bytes from the beginning of the workspace.
struct Workspace {
  int64_t expert_offsets, pair_to_row, row_to_pair, sort, counters;
  int64_t operand1, scales1, sums1, operand2, scales2, sums2;
  int64_t scale_stride;  // between blocks along K
  int64_t bytes;
};

inline int64_t ElementBytes(Element x) {
  if (x == Element::kFloat32) return 4;
  return x == Element::kE4M3 || x == Element::kE5M2 ? 1 : 2;
}

inline Rounding RoundingOf(Format format, int product) {
  switch (format) {
    case Format::kFp8Tensor:  // the caller quantised the input
      return product == 1 ? Rounding::kElement : Rounding::kFactor;
    case Format::kFp8Block:
      return Rounding::kBlocks;
    case Format::kInt4Fp8:
      return Rounding::kColumns;
    case Format::kMxfp4Fp8:
      return Rounding::kRows;
    default:
      return Rounding::kElement;
  }
}

inline Workspace LayOut(const LayerSizes& s) {
  constexpr int64_t ALIGNMENT = 256;
  int64_t end = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t begin = end;
    end += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return begin;
  };
  const int64_t pairs = s.pairs();
  const int64_t operand = s.format == Format::kPlain || s.format == Format::kMxfp4 || s.has_wide_codes ? 2 : 1;
  Workspace w{};
  w.scale_stride = (pairs + 3) / 4 * 4;  // the copy engine of Hopper asks for rows of 16 bytes
  const auto scale_bytes = [&](int64_t columns) -> int64_t {
    if (s.format == Format::kFp8Block) return (columns + 127) / 128 * w.scale_stride * 4;
    return s.format == Format::kMxfp4Fp8 ? pairs * 4 : 0;
  };
  w.expert_offsets = take((s.num_experts + 1) * 4);
  w.pair_to_row = take(pairs * 4);
  w.row_to_pair = take(pairs * 4);
  w.sort = take(MoeSortWorkspaceInts(pairs, s.num_experts) * 4);
  w.counters = take(MOE_SORT_COUNTERS * 4);
  w.operand2 = take(pairs * s.intermediate * operand);
  w.scales2 = take(scale_bytes(s.intermediate));
  const int64_t shared = end;
  w.operand1 = take(pairs * s.hidden * operand);
  w.scales1 = take(scale_bytes(s.hidden));
  w.sums1 = take(s.has_sums1 ? pairs * s.fc1_rows() * ElementBytes(s.sums1) : 0);
  const int64_t end1 = end;
  end = shared;
  w.sums2 = take(pairs * s.hidden * ElementBytes(s.sums2));
  w.bytes = std::max({end, end1, ALIGNMENT});
  return w;
}

}  // namespace fused_moe
}  // namespace flashinfer
