// SPDX-License-Identifier: Apache-2.0
// Matrix products d = alpha * a b^T + beta * d + bias for operands of any strides, shared by both backends: dense,
// batched and grouped, 8-bit operands with scales of tensors or blocks. Sums are fp32, rounded once.
// Defined in gemm.cuh (CUDA) and gemm_cpu.h (CPU). gemm/sm90/problem.h describes the faster kernels for Hopper.
//   test  pytest tests/gemm      bench  python benchmarks/bench_gemm.py
#pragma once
#include "backend.h"

namespace flashinfer {
namespace gemm {

/// Assignment of token rows to weight matrices.
enum class Grouping {
  kBatched,     // a (batch, m, k), b (batch, n, k), d (batch, m, n); a dense GEMM is a batch of one
  kContiguous,  // a (m, k), b (groups, n, k): groups[row] is the group of a row, equal in each 128 rows; -1: left out
  kMasked,  // a (groups, m, k), b (groups, n, k), d (groups, m, n): the first groups[g] rows of group g are computed
  kPacked,  // a (m, k), b (groups, n, k): rows groups[g] .. groups[g + 1] belong to group g
};

/// Element types of operands, bias and result.
enum class Element { kFloat32, kFloat16, kBFloat16, kE4M3, kE5M2 };

/// A matrix, or a batch of matrices, of any strides (in elements).
struct Matrix {
  void* data = nullptr;
  Element element = Element::kBFloat16;
  int64_t batch_stride = 0, row_stride = 0, column_stride = 1;
};

/// fp32 scales of an operand: element (row, k) is multiplied by data[row / rows * row_stride + k / depth * k_stride] of
/// its batch entry. A scale of the whole tensor has strides of zero; data is null where there is none.
struct Scale {
  const float* data = nullptr;
  int64_t batch_stride = 0, row_stride = 0, k_stride = 0;
  int64_t rows = 1;   // rows that share a scale
  int64_t depth = 1;  // elements along K that share a scale
};

struct GemmArguments {
  Matrix a, b, d;          // a: tokens by K, b: weights by K, d: tokens by weights
  Scale a_scale, b_scale;  // blocks along K have the same depth in both
  const void* bias = nullptr;
  Element bias_element = Element::kBFloat16;
  float alpha = 1.f, beta = 0.f;  // beta = 0: d is not read
  int64_t m = 0, n = 0, k = 0;    // m: rows of tokens, per batch entry or masked group
  int64_t batch = 1;              // kBatched: number of problems; otherwise number of groups
  Grouping grouping = Grouping::kBatched;
  const int32_t* groups = nullptr;          // as Grouping says
  const int32_t* weight_indices = nullptr;  // matrix of b of each group; null: group g has matrix g
  int64_t weights = 1;                      // matrices that weight_indices may name; CUDA leaves out groups of others
  bool enable_pdl = false;                  // CUDA only: programmatic dependent launch
};

/// Compute the product. Rows that belong to no group are not written.
Status Gemm(const GemmArguments& arguments, Stream stream);

}  // namespace gemm
}  // namespace flashinfer
