// SPDX-License-Identifier: Apache-2.0
// Block scales of a stage: one producer warp copies them to shared memory with the stage, so that their latency is
// hidden like that of the operands. Consumer threads read those of their accumulators before the products.
#pragma once
#include "../../hopper/ring.cuh"
#include "../../ptx/cp_async.cuh"
#include "columns.h"
#include "params.cuh"

namespace flashinfer {
namespace gemm {

/// Scales of one stage in shared memory, in floats: one per token of the tile, then one per weight column (SINGLE: per
/// weight, or only the first if the weights of a narrow tile share it; otherwise per 128 weights; one per head, then one per 16 weights of the tail).
template <int TOKENS, int WEIGHTS, bool SINGLE>
struct StageScales {
  using Columns = TileColumns<WEIGHTS>;
  static constexpr bool HAS_TAIL = !SINGLE && Columns::HAS_TAIL;
  static constexpr int WEIGHT_SCALES = SINGLE     ? WEIGHTS
                                       : HAS_TAIL ? 1 + Columns::TAIL / Columns::SCALED
                                                  : (WEIGHTS + SCALE_BLOCK - 1) / SCALE_BLOCK;
  static constexpr int FLOATS = (TOKENS + WEIGHT_SCALES + 3) / 4 * 4;
  static constexpr int BYTES = FLOATS * 4;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Copies of the scales of one tile by a warp. Scales of rows beyond the end of the problem are not copied: what is in
/// their place affects only results that are not stored.
template <int TOKENS, int WEIGHTS, bool SINGLE>
class ScaleCopies {
 public:
  using Layout = StageScales<TOKENS, WEIGHTS, SINGLE>;

  __device__ __forceinline__ ScaleCopies(const GemmParams& p, const Tile& tile)
      : tokens_(tile.end_row - tile.row), weights_(p.activation.is_active ? WEIGHTS : p.n - tile.n_tile * WEIGHTS) {
    const int lane = threadIdx.x % 32;
    token_ = p.token_scale.data + tile.token_batch * p.token_scale.batch_stride +
             (tile.row + lane) * p.token_scale.row_stride;
    int row = tile.n_tile * WEIGHTS + (SINGLE ? lane : lane * SCALE_BLOCK);
    if (!SINGLE) weights_ += tile.n_tile * WEIGHTS % SCALE_BLOCK;  // counted from the start of the first block
    if (p.activation.is_active) row = tile.n_tile * (WEIGHTS / 2) + lane * p.n;  // a block of up, one of gate columns
    if constexpr (Layout::HAS_TAIL) {
      using Columns = typename Layout::Columns;
      row = lane == 0 ? Columns::Head(tile.n_tile)
                      : Columns::Tail(tile.n_tile, p.tiles.TilesAlongN()) + (lane - 1) * Columns::SCALED;
      weights_ = p.n - row;
    }
    const int weight = row / p.weight_scale.rows;
    weight_ =
        p.weight_scale.data + tile.weight_batch * p.weight_scale.batch_stride + weight * p.weight_scale.row_stride;
  }

  __device__ __forceinline__ void Run(const GemmParams& p, uint32_t to, int kb) const {
    RunTokens(p, to, kb);
    RunWeights(p, to, kb);
  }

  __device__ __forceinline__ void RunTokens(const GemmParams& p, uint32_t to, int kb) const {
    const int lane = threadIdx.x % 32;
    const float* token = token_ + kb * p.token_scale.k_stride;
#pragma unroll 1
    for (int i = lane; i < min(TOKENS, tokens_); i += 32, token += 32 * p.token_scale.row_stride) {
      ptx::CopyAsync4(to + 4 * i, token);
    }
  }

  __device__ __forceinline__ void RunWeights(const GemmParams& p, uint32_t to, int kb) const {
    const int lane = threadIdx.x % 32;
    const float* weight = weight_ + kb * p.weight_scale.k_stride;
    if constexpr (SINGLE) {
      if (WEIGHTS < SCALE_BLOCK && p.weight_scale.rows != 1) {
        if (lane == 0) ptx::CopyAsync4(to + 4 * TOKENS, weight);
        return;
      }
      // 32 weights have 32 scales, or one that repeats
      const int64_t step = p.weight_scale.rows == 1 ? 32 * p.weight_scale.row_stride : 0;
#pragma unroll 1
      for (int i = lane; i < min(WEIGHTS, weights_); i += 32, weight += step) {
        ptx::CopyAsync4(to + 4 * (TOKENS + i), weight);
      }
    } else if (lane < Layout::WEIGHT_SCALES && (Layout::HAS_TAIL ? 0 : lane * SCALE_BLOCK) < weights_) {
      ptx::CopyAsync4(to + 4 * (TOKENS + lane), weight);
    }
  }

 private:
  const float* token_;   // scale of this lane's first token at K block 0
  const float* weight_;  // scale of this lane's first weight, or block of weights
  // Rows to the end of the problem: from the first of the tile, or of its block of weights; with a tail, from this lane's.
  int tokens_, weights_;
};

/// Scales of a thread's accumulators with tokens on the M side: two token scales for each wave of 64 rows, times the
/// scale of the weights. COLUMNS beyond 128 belong to two blocks of weights, which meet at a multiple of 64.
template <int WAVES, int COLUMNS, int STAGE_FLOATS>
class RowScales {
 public:
  /// `tokens`, `weight`: scales of stage 0 of this thread's first row and of the first block of weights. `column`: the
  /// warpgroup's first one.
  __device__ __forceinline__ RowScales(const float* tokens, const float* weight, int column)
      : tokens_(tokens), weight_(weight), second_(SLABS > 2 && column % SCALE_BLOCK != 0 ? 1 : 2) {}

  __device__ __forceinline__ void Take(int stage) {
    const float first = weight_[stage * STAGE_FLOATS];
#pragma unroll
    for (int i = 0; i < 2 * WAVES; ++i) {
      const float token = tokens_[stage * STAGE_FLOATS + i / 2 * 64 + i % 2 * 8];
      now_[0][i] = token * first;
      if constexpr (SLABS > 2) {
        now_[2][i] = token * weight_[stage * STAGE_FLOATS + 1];
        now_[1][i] = second_ == 1 ? now_[2][i] : now_[0][i];
      }
    }
  }
  template <int COUNT>
  __device__ __forceinline__ void Add(float (&acc)[COUNT], const float (&x)[COUNT], int wave) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      acc[i] = fmaf(x[i], now_[SLABS > 2 ? i / 32 : 0][2 * wave + i % 4 / 2], acc[i]);
    }
  }

 private:
  static constexpr int SLABS = COLUMNS / 64;  // pieces of 64 columns
  static_assert(SLABS <= 3, "two blocks of weights");
  const float *tokens_, *weight_;
  const int second_;  // the first slab of the second block of weights
  float now_[SLABS > 2 ? 3 : 1][2 * WAVES];
};

/// Scales of a thread's accumulators with tokens on the M side: 64 rows by COLUMNS columns, in parts of one size. Columns
/// belong to one or two blocks of weights, which meet at a multiple of 64.
template <int COLUMNS, int PARTS, int STAGE_FLOATS>
class PartScales {
 public:
  /// `tokens`, `weights`: scales of stage 0 of this thread's first row and of the first block of weights. `column`: the
  /// warpgroup's first one.
  __device__ __forceinline__ PartScales(const float* tokens, const float* weights, int column)
      : tokens_(tokens), weights_(weights), is_offset_(column % SCALE_BLOCK != 0) {}

  /// Read the scales of a stage.
  __device__ __forceinline__ void Take(int stage) {
#pragma unroll
    for (int i = 0; i < 2; ++i) next_tokens_[i] = tokens_[stage * STAGE_FLOATS + 8 * i];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) next_weights_[i] = weights_[stage * STAGE_FLOATS + i];
  }
  /// Let Add() use the scales read last.
  __device__ __forceinline__ void Use() {
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) now_[i / 2][i % 2] = next_tokens_[i % 2] * next_weights_[i / 2];
  }
  /// Add the scaled products `x` of a part to acc, which counts the registers of all parts in order.
  template <int WAVES, int WAVE, int COUNT>
  __device__ __forceinline__ void Add(float (&acc)[WAVES][WAVE], const float (&x)[COUNT], int part) const {
    // Of three slabs of 64 columns, the second belongs to either block.
    float second[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) second[i] = is_offset_ ? now_[BLOCKS - 1][i] : now_[0][i];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int at = part * COUNT + i, slab = at / 32, row = i % 4 / 2;  // 32 registers are 64 columns
      const float factor = COLUMNS % SCALE_BLOCK == 0 ? now_[slab / 2][row]
                           : slab == 1                ? second[row]
                                                      : now_[slab / 2][row];
      acc[at / WAVE][at % WAVE] = fmaf(x[i], factor, acc[at / WAVE][at % WAVE]);
    }
  }

 private:
  static constexpr int BLOCKS = (COLUMNS + SCALE_BLOCK - 1) / SCALE_BLOCK;
  static_assert(COLUMNS % 64 == 0 && BLOCKS <= 2 && COLUMNS % PARTS == 0, "two blocks of weights");
  const float *tokens_, *weights_;
  const bool is_offset_;  // columns begin in the middle of a block of weights
  float next_tokens_[2], next_weights_[BLOCKS];
  float now_[BLOCKS][2] = {};  // factors by block of weights and by row
};

/// Scales as PartScales of a tile that has a tail: one of the weights for the head, one for every 16 columns of the tail.
template <int TAIL, int STAGE_FLOATS>
class TailScales {
 public:
  __device__ __forceinline__ TailScales(const float* tokens, const float* weights, int)
      : tokens_(tokens), weights_(weights) {}

  __device__ __forceinline__ void Take(int stage) {
#pragma unroll
    for (int i = 0; i < 2; ++i) next_tokens_[i] = tokens_[stage * STAGE_FLOATS + 8 * i];
    next_weights_ = *reinterpret_cast<const float4*>(weights_ + stage * STAGE_FLOATS);
  }
  __device__ __forceinline__ void Use() {
    const float weights[] = {next_weights_.x, next_weights_.y, next_weights_.z, next_weights_.w};
#pragma unroll
    for (int i = 0; i < 2 * SCALES; ++i) now_[i / 2][i % 2] = next_tokens_[i % 2] * weights[i / 2];
  }
  template <int WAVES, int WAVE, int COUNT>
  __device__ __forceinline__ void Add(float (&acc)[WAVES][WAVE], const float (&x)[COUNT], int part) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int at = part * COUNT + i, tail = at - SCALE_BLOCK / 2;  // 8 registers are 16 columns
      const float factor = now_[tail < 0 ? 0 : 1 + tail / 8][i % 4 / 2];
      acc[at / WAVE][at % WAVE] = fmaf(x[i], factor, acc[at / WAVE][at % WAVE]);
    }
  }

 private:
  static constexpr int SCALES = 1 + TAIL / 16;
  static_assert(TAIL % 16 == 0 && SCALES <= 4 && STAGE_FLOATS % 4 == 0, "scales of the weights in 16 bytes");
  const float *tokens_, *weights_;
  float next_tokens_[2];
  float4 next_weights_;
  float now_[SCALES][2] = {};  // factors by scale of the weights and by row
};

/// Scales of a thread's accumulators with weights on the M side: two rows of weights, and two tokens of every eight.
template <int TOKENS, int STAGE_FLOATS>
class ColumnScales {
 public:
  /// `tokens`, `weights`: scales of stage 0 of this thread's first two tokens and of its first row of weights. `step`:
  /// distance to the scale of its second row, 8 rows behind; 0 if they share one.
  __device__ __forceinline__ ColumnScales(const float* tokens, const float* weights, int step = 8)
      : tokens_(tokens), weights_(weights), step_(step) {}

  __device__ __forceinline__ void Take(int stage) {
#pragma unroll
    for (int i = 0; i < 2; ++i) now_weights_[i] = weights_[stage * STAGE_FLOATS + step_ * i];
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
      now_tokens_[i] = *reinterpret_cast<const float2*>(tokens_ + stage * STAGE_FLOATS + 8 * i);
    }
  }
  __device__ __forceinline__ void Add(float (&acc)[TOKENS / 2], const float (&x)[TOKENS / 2], int) const {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      const float token = i % 2 ? now_tokens_[i / 4].y : now_tokens_[i / 4].x;
      acc[i] = fmaf(x[i], now_weights_[i % 4 / 2] * token, acc[i]);
    }
  }

 private:
  const float *tokens_, *weights_;
  const int step_;
  float2 now_tokens_[TOKENS / 8];
  float now_weights_[2];
};

/// Scales of a thread's accumulators with weights on the M side: one of a block of up columns, one of a block of gate
/// columns, and two tokens of every eight.
template <int TOKENS, int STAGE_FLOATS>
class GatedColumnScales {
 public:
  /// `tokens`, `weights`: scales of stage 0 of this thread's first two tokens and of the up columns.
  __device__ __forceinline__ GatedColumnScales(const float* tokens, const float* weights)
      : tokens_(tokens), weights_(weights) {}

  __device__ __forceinline__ void Take(int stage) {
    now_weights_ = *reinterpret_cast<const float2*>(weights_ + stage * STAGE_FLOATS);
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
      now_tokens_[i] = *reinterpret_cast<const float2*>(tokens_ + stage * STAGE_FLOATS + 8 * i);
    }
  }
  /// Add the scaled products of the up columns (half 0) or gate columns.
  __device__ __forceinline__ void Add(float (&acc)[TOKENS / 2], const float (&x)[TOKENS / 2], int half) const {
    const float weight = half == 0 ? now_weights_.x : now_weights_.y;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      const float token = i % 2 ? now_tokens_[i / 4].y : now_tokens_[i / 4].x;
      acc[i] = fmaf(x[i], weight * token, acc[i]);
    }
  }

 private:
  const float *tokens_, *weights_;
  float2 now_tokens_[TOKENS / 8], now_weights_;
};

#endif

}  // namespace gemm
}  // namespace flashinfer
