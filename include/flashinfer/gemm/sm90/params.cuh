// SPDX-License-Identifier: Apache-2.0
// Parameters of the SM90 GEMM kernels, and their construction from a GemmProblem.
#pragma once
#include <algorithm>

#include "../../device/occupancy.cuh"
#include "../../hopper/roles.cuh"
#include "../../hopper/tensor_map_cache.h"
#include "../../ptx/wgmma.cuh"
#include "../../utils.cuh"
#include "problem.h"
#include "tiles.cuh"

namespace flashinfer {
namespace gemm {

using hopper::MAX_SHARED_BYTES;
using hopper::WARPGROUP;
constexpr int BARRIER_BYTES = 1024;  // barriers and flags before the stages; a multiple of the stages' alignment
constexpr int CONSUMERS = 2;         // warpgroups that multiply
constexpr int GEMM_THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int PRODUCER_REGISTERS = 40;  // 40 * 128 + 232 * 256 = 168 * 384
constexpr int CONSUMER_REGISTERS = 232;

/// Barriers of some warps. Instructions have constant numbers: otherwise a block takes all 16.
enum class NamedBarrier : int {
  kConsumers = 1,   // the first two consumer warpgroups: what they tell each other is in shared memory
  kSecondPair = 2,  // the third and the fourth (w4_sm90/kernel.cuh)
  kFirstRows = 2,   // warps of rows 0 to 63 (w4_sm90/stream.cuh)
  kSecondRows = 3,  // warps of rows 64 to 127
};

template <typename T>
struct WgmmaTypeOf;
template <>
struct WgmmaTypeOf<bfloat16_t> {
  static constexpr ptx::WgmmaType TYPE = ptx::WgmmaType::kBf16;
  static constexpr int BYTES = 2;
};
template <>
struct WgmmaTypeOf<float16_t> {
  static constexpr ptx::WgmmaType TYPE = ptx::WgmmaType::kF16;
  static constexpr int BYTES = 2;
};
template <>
struct WgmmaTypeOf<float8_e4m3_t> {
  static constexpr ptx::WgmmaType TYPE = ptx::WgmmaType::kE4m3;
  static constexpr int BYTES = 1;
};

constexpr int CHUNK_BYTES = 16;  // bytes of a copy

/// Rows of tokens that a kernel reads without a tensor map: it finds them by their numbers, or quantises all of them.
struct GatheredRows {
  const char* data;
  const int32_t* indices;  // null: tokens are quantised, or loaded through their tensor map
  uint32_t divisor;
  uint32_t stride_chunks;  // distance between rows, in chunks of 16 bytes
};

/// Parameters of GemmSm90Kernel and GemmSwappedSm90Kernel.
struct GemmParams {
  CUtensorMap tokens, weights;  // first members, because a CUtensorMap is aligned to 64 bytes
  TileParams tiles;
  ScaleView token_scale, weight_scale;
  void* d;
  int64_t d_stride, d_batch_stride;
  const bfloat16_t* bias;
  const float* weight_factors;
  GatedActivation activation;
  int n, k_blocks;                   // n: columns of d
  int cluster;                       // blocks that share an operand, or split K of a swapped tile
  bool share_tokens, share_weights;  // each block of a cluster loads half of the operand and multicasts that half
  Element out;
  bool weights_first;        // weights do not depend on the kernel before this one, which waited for those before it
  bool read_weights_once;    // weights are loaded with the L2 policy evict-first
  GatheredRows gathered;     // instead of `tokens`
  int split;                 // blocks that split K of a tile with tokens on the M side
  CUtensorMap weight_tails;  // tails of tiles (columns.h)
};

/// Encode the tensor map of `batch` matrices of `rows` by `columns` elements, with boxes of `box_rows` by
/// `box_columns`.
inline cudaError_t EncodeMatrix(CUtensorMap* map, const void* data, int bytes, int64_t columns, int64_t rows,
                                int64_t stride, int64_t batch, int64_t batch_stride, int box_columns, int box_rows) {
  hopper::TensorBox t;
  t.data = data;
  t.element_bytes = bytes;
  t.size[0] = columns, t.size[1] = rows, t.size[2] = batch;
  t.stride_bytes[0] = stride * bytes, t.stride_bytes[1] = batch_stride * bytes;
  t.box[0] = box_columns, t.box[1] = box_rows;
  return hopper::FindTensorMap(map, t);
}

/// Fill the parameters that both kernels share. `token_rows`, `weight_rows`: tokens and weights per tile, of which
/// `tail_rows` are in its tail.
template <typename T>
cudaError_t FillParams(GemmParams* p, const GemmProblem& x, const GemmConfig& c, int token_rows, int weight_rows,
                       int tail_rows = 0) {
  constexpr int BYTES = WgmmaTypeOf<T>::BYTES, BLOCK_K = SLAB_K_BYTES / BYTES;
  const bool one_token_batch = x.grouping == Grouping::kContiguous || x.grouping == Grouping::kPacked;
  const int64_t token_batch = one_token_batch ? 1 : x.batch;
  const bool is_pair = !c.swapped && !c.split_k && c.cluster == 2;
  p->share_tokens = is_pair && !c.share_b;
  p->share_weights = is_pair && c.share_b;
  const bool is_gated = x.activation.is_active;  // a tile then has two boxes of weights
  const int a_box = p->share_tokens ? token_rows / 2 : token_rows, b_parts = p->share_weights || is_gated ? 2 : 1;
  cudaError_t status = cudaSuccess;
  if (x.is_unquantized) {
    const bool is_one = x.grouping == Grouping::kBatched && x.batch == 1 && x.m <= token_rows && c.swapped;
    const uint64_t stride = x.m > 1 ? uint64_t(x.a_stride) * sizeof(bfloat16_t) : 0;
    if (!is_one || x.row_indices != nullptr || x.b_scale.rows != SCALE_BLOCK || x.k % BLOCK_K != 0 ||
        (reinterpret_cast<uintptr_t>(x.a) | stride) % CHUNK_BYTES != 0 || (stride / CHUNK_BYTES) >> 32 != 0) {
      return cudaErrorInvalidValue;
    }
    p->gathered = {static_cast<const char*>(x.a), nullptr, 1, uint32_t(stride / CHUNK_BYTES)};
  } else if (x.row_indices == nullptr) {
    status = EncodeMatrix(&p->tokens, x.a, BYTES, x.k, x.m, x.a_stride, token_batch, x.a_batch_stride, BLOCK_K, a_box);
  } else {
    const int64_t stride = x.a_stride * BYTES, chunks = stride / CHUNK_BYTES;
    if (c.swapped || x.row_divisor < 1 || stride % CHUNK_BYTES != 0 || x.k % BLOCK_K != 0) return cudaErrorInvalidValue;
    if ((x.m / x.row_divisor + 1) * chunks >> 32 != 0) return cudaErrorInvalidValue;  // 64 GiB of tokens
    p->gathered = {static_cast<const char*>(x.a), x.row_indices, uint32_t(x.row_divisor), uint32_t(chunks)};
  }
  if (status != cudaSuccess) return status;
  status = EncodeMatrix(&p->weights, x.b, BYTES, x.k, x.n, x.b_stride, x.weights, x.b_batch_stride, BLOCK_K,
                        (weight_rows - tail_rows) / b_parts);
  if (status == cudaSuccess && tail_rows > 0) {
    status = EncodeMatrix(&p->weight_tails, x.b, BYTES, x.k, x.n, x.b_stride, x.weights, x.b_batch_stride, BLOCK_K,
                          tail_rows / b_parts);
  }
  if (status != cudaSuccess) return status;
  TileParams& t = p->tiles;
  t.groups = x.groups, t.group_count = int(x.batch), t.m = int(x.m);
  t.weight_indices = x.weight_indices, t.weights = int(x.weights);
  t.batch = x.grouping == Grouping::kBatched ? int(x.batch) : 1;
  t.pair_m = p->share_weights, t.pair_n = p->share_tokens;
  t.m_tiles = CeilDivide(CeilDivide(int(x.m), token_rows), t.pair_m ? 2 : 1);
  t.n_tiles = CeilDivide(CeilDivide(int(x.n), weight_rows), t.pair_n ? 2 : 1);
  t.grouping = x.grouping;
  t.raster = t.IsCounted() ? std::max(1, GROUP_BAND_ROWS / token_rows) : std::max(1, std::min(c.raster, t.m_tiles));
  t.counter = t.IsCounted() && !c.swapped && c.cluster == 1 ? x.tile_counter : nullptr;
  p->token_scale = x.a_scale, p->weight_scale = x.b_scale;
  p->d = x.d, p->d_stride = x.d_stride, p->d_batch_stride = one_token_batch ? 0 : x.d_batch_stride;
  p->bias = x.bias, p->weight_factors = x.weight_factors;
  p->activation = x.activation;
  p->n = int(is_gated ? x.n / 2 : x.n), p->k_blocks = int(CeilDiv(x.k, BLOCK_K));
  p->cluster = c.split_k ? 1 : c.cluster, p->split = c.split_k ? c.cluster : 1;
  p->out = x.out;
  return cudaSuccess;
}

}  // namespace gemm
}  // namespace flashinfer
