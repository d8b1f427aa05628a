// SPDX-License-Identifier: Apache-2.0
// What a GEMM on SM90 is asked for: d = a b^T by rows of tokens (a) and of weights (b), both K-major, for one problem, a
// batch, or groups of tokens that each have their own weights.
#pragma once
#include <cstdint>

#include "../backend.h"

namespace flashinfer {
namespace gemm {

/// Which weights a row of tokens is multiplied with.
enum class Grouping {
  kBatched,     // a (batch, m, k), b (batch, n, k), d (batch, m, n); a dense GEMM is a batch of one
  kContiguous,  // a (m, k), b (groups, n, k): groups[row] is the group of a row, equal in each 128 rows; -1: left out
  kMasked,  // a (groups, m, k), b (groups, n, k), d (groups, m, n): the first groups[g] rows of group g are computed
  kPacked,  // a (m, k), b (groups, n, k): rows groups[g] .. groups[g + 1] belong to group g
};

/// How products become results.
enum class Scaling {
  kTensor,  // times *a_scale and *b_scale, where given
  kBlock,   // by blocks of 128 of K: a_scale per row of tokens, b_scale per row or 128 rows of weights
};

constexpr int SCALE_BLOCK = 128;
constexpr int SLAB_K_BYTES = 128;          // K of a stage of the ring
constexpr int CONTIGUOUS_ALIGNMENT = 128;  // rows that share a group in kContiguous

/// A matrix of fp32 scales, or of weights' and tokens' rows: strides in elements.
struct ScaleView {
  const float* data = nullptr;
  int64_t batch_stride = 0, row_stride = 0, k_stride = 0;
  int rows = 1;  // rows that share a scale: 1 or 128
};

struct GemmProblem {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  int64_t m = 0, n = 0, k = 0;                       // m: rows of tokens, of one batch or masked group
  int64_t batch = 1;                                 // kBatched: problems; else: groups
  int64_t a_stride = 0, b_stride = 0, d_stride = 0;  // rows, in elements
  int64_t a_batch_stride = 0, b_batch_stride = 0, d_batch_stride = 0;  // batches or groups
  Grouping grouping = Grouping::kBatched;
  const int32_t* groups = nullptr;
  ScaleView a_scale, b_scale;
  bool half_output = false;    // d is fp16, not bf16
  float* workspace = nullptr;  // of the swapped form: WorkspaceBytes(), its counters zero before the first call
};

/// The tile of a kernel and how blocks share loads.
struct GemmConfig {
  bool swapped = false;  // weights on the side of 64 rows, tokens on the other
  int block_m = 128;     // tokens of a tile
  int block_n = 128;     // weights of a tile
  int cluster = 1;       // 2: pairs of blocks share an operand
  bool share_b = false;  // the pair is two tiles along M and shares weights; else along N and shares tokens
  int raster = 8;        // tiles along M that are walked before the next along N
  int blocks = 132;      // blocks to launch at most, one per SM
  bool enable_pdl = false;
};

}  // namespace gemm
}  // namespace flashinfer
