// SPDX-License-Identifier: Apache-2.0
// Description of a GEMM on SM90: d = a b^T with rows of tokens (a) and rows of weights (b), both K-major, for one
// problem, a batch of problems, or groups of tokens that each have their own weights.
#pragma once
#include <cstdint>

#include "../../gemm.h"

namespace flashinfer {
namespace gemm {

/// Scaling of products to results.
enum class Scaling {
  kTensor,  // one factor per tensor: *a_scale and *b_scale; null means 1
  kBlock,   // scales per block of 128 along K: a_scale per row of tokens, b_scale per row or 128 rows of weights
};

constexpr int SCALE_BLOCK = 128;
constexpr int SLAB_K_BYTES = 128;          // bytes of K per stage of the ring
constexpr int CONTIGUOUS_ALIGNMENT = 128;  // rows that share a group in kContiguous
constexpr int SWAPPED_WEIGHTS = 128;       // rows of weights of a swapped tile
constexpr int ALTERNATE_WEIGHTS = 64;      // weights of a tile whose warpgroups take stages in turn
constexpr int QUANTIZING_TOKENS = 8;       // tokens at most that a product quantises itself
constexpr int ALTERNATE_MAX_SPLIT = 4;     // blocks at most that split K of such a tile
constexpr int PLAIN_MAX_SPLIT = 4;         // the same of a tile with tokens on the M side: 2 or 4 blocks
constexpr int GATED_BLOCK_TOKENS = 32;     // tokens at most of a swapped tile that activates and quantises by blocks

/// Matrix of fp32 scales of tokens or weights. Strides are in elements.
struct ScaleView {
  const float* data = nullptr;
  int64_t batch_stride = 0, row_stride = 0, k_stride = 0;
  int rows = 1;  // rows that share a scale: 1 or 128
};

/// Gated activation of the sums of groups of tokens that have their own weights (the experts of a layer). Rows of weights
/// are [up ; gate], and results have half as many columns: g sigmoid(alpha g) (u + beta) with g = min(gate, limit) and u
/// = up limited to both sides, of sums * factor + bias. Arrays have one element per matrix of weights. Null means alpha
/// 1, beta 0, no limit, factor 1, no bias.
struct GatedActivation {
  bool is_active = false;
  const float *alpha = nullptr, *beta = nullptr, *limit = nullptr, *factor = nullptr;
  const void* bias = nullptr;          // (matrices of weights, n), bf16
  bool is_bias_half = false;           // fp16 instead
  const float* quantizer = nullptr;    // results are multiplied by it before they are rounded; null: 1
  bool is_quantizer_of_group = false;  // one per matrix of weights instead of one
  // Block scales only: sums and results are rounded to bf16, then results are quantised by row and 128 columns (n / 2 is
  // a multiple of 128), with scales (columns / 128, rows) of this stride between blocks.
  float* scales = nullptr;
  int64_t scale_stride = 0;
};

struct GemmProblem {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  int64_t m = 0, n = 0, k = 0;                       // m: rows of tokens, per batch entry or masked group
  int64_t expected_rows = 0;                         // kPacked: rows in groups that a tile is chosen for; 0: m
  int64_t batch = 1;                                 // kBatched: number of problems; otherwise number of groups
  int64_t weights = 1;                               // matrices in b; equal to `batch` without weight_indices
  int64_t a_stride = 0, b_stride = 0, d_stride = 0;  // distance between rows, in elements
  int64_t a_batch_stride = 0, b_batch_stride = 0, d_batch_stride = 0;  // distance between batch entries or groups
  Grouping grouping = Grouping::kBatched;
  const int32_t* groups = nullptr;
  ScaleView a_scale, b_scale;
  Element out = Element::kBFloat16;         // element type of d: bf16, fp16 or fp32; bf16, fp16 or e4m3 if activated
  const bfloat16_t* bias = nullptr;         // one per row of weights, added before rounding
  const int32_t* weight_indices = nullptr;  // matrix of b of each group; null: group g has matrix g; kPacked only
  const float* weight_factors = nullptr;    // factor of the sums of each matrix of b; null: 1. Not if activated
  // kPacked with block scales and whole blocks of K: row r of the product is row row_indices[r] / row_divisor of a, which has
  // its own number of rows (gather.cuh). Null: row r. Numbers of rows that belong to no group are not read.
  const int32_t* row_indices = nullptr;
  int row_divisor = 1;
  // kBatched, one problem of up to QUANTIZING_TOKENS rows, whole blocks of K and block scales of 128 weights: a is bf16, which
  // the kernel quantises by row and 128 columns (swap_ab_quantize.cuh). a_scale is not read.
  bool is_unquantized = false;
  int32_t* tile_counter = nullptr;  // a zero in device memory that the kernel advances, or null (tile_queue.cuh)
  GatedActivation activation;

  int64_t ExpectedRows() const { return expected_rows > 0 ? expected_rows : m; }
};

/// Tile shape of a kernel, and sharing of loads between blocks.
struct GemmConfig {
  bool swapped = false;  // weights on the M side, tokens on the N side
  int block_m = 128;     // tokens per tile
  int block_n = 128;     // weights per tile
  int cluster = 1;       // blocks per cluster: 2 share an operand; if swapped or with `split_k`, several split K
  bool share_b = false;  // true: the pair computes two tiles along M and shares weights; false: along N, shares tokens
  bool split_k = false;  // tokens on the M side: the blocks of a cluster share no operand, but split K (split_k.cuh)
  int raster = 8;        // tiles along M per band; a band visits all of them before the next tile along N
  int blocks = 132;      // blocks to launch at most, one per SM
  bool enable_pdl = false;
  bool weights_first = false;  // with PDL: only tokens and scales are written by the kernel before this one
  bool groups_first = false;   // with weights_first: nor did that kernel write `groups`
};

constexpr int COPY_ALIGNMENT = 16;  // bytes

/// Return true if rows are contiguous and begin at multiples of 16 bytes. Strides are in elements; the stride of a
/// dimension of one element does not matter. A stride of 0, which repeats an element, is refused.
inline bool TakesBulkCopies(const void* data, int element_bytes, int rank, const int64_t* sizes,
                            const int64_t* strides) {
  if (strides[rank - 1] != 1 && sizes[rank - 1] != 1) return false;
  uint64_t offsets = reinterpret_cast<uintptr_t>(data);
  for (int i = 0; i + 1 < rank; ++i) {
    if (sizes[i] == 1) continue;
    if (strides[i] == 0) return false;
    offsets |= uint64_t(strides[i]) * element_bytes;
  }
  return offsets % COPY_ALIGNMENT == 0;
}

/// Return true if a tile can apply a gated activation: with tokens on the M side it stores 64 of its columns at a time,
/// or, with block scales, quantises 128 up columns and 128 gate columns to one block. With weights on the M side few
/// tokens are quantised, and both warpgroups have rows.
constexpr bool CanGate(bool is_block, bool swapped, int block_m, int block_n) {
  if (swapped) return block_n == SWAPPED_WEIGHTS && (!is_block || block_m <= GATED_BLOCK_TOKENS);
  return is_block ? block_m == 128 && block_n == 256 : block_n % 128 == 0;
}

/// Form of a kernel with tokens on the M side.
enum class Form {
  kPlain,
  kGather,  // tokens are those of row_indices (gather.cuh)
  kSplit,   // the blocks of a cluster split K (split_k.cuh)
};

/// Compute d = a b^T with tiles of BLOCK_M tokens by BLOCK_N weights (kernel.cuh).
template <typename T, Scaling SCALING, int BLOCK_M, int BLOCK_N, Form FORM = Form::kPlain>
Status GemmSm90(const GemmProblem& problem, const GemmConfig& config, Stream stream);

/// Compute d = a b^T with weights on the M side of the tensor cores: tiles of TOKENS by 128 or 64 weights
/// (swap_ab_kernel.cuh). ENCODES: tokens are bf16, and the kernel quantises them.
template <typename T, Scaling SCALING, int TOKENS, int WEIGHTS = SWAPPED_WEIGHTS, bool ENCODES = false>
Status GemmSwappedSm90(const GemmProblem& problem, const GemmConfig& config, Stream stream);

}  // namespace gemm
}  // namespace flashinfer
