// SPDX-License-Identifier: Apache-2.0
// Order in which a warp of fp8_one.cuh and fp8_few.cuh copies weights to its ring.
//
// A warp takes sources in turn: chunks of 128 columns of the token in GEMM 1, of the hidden values of all experts in
// GEMM 2. It keeps a source for all tiles of 16 rows that the block has, up to a batch of them. GEMM 1 computes units: a
// hidden value's rows of gate and up, or, without gates, two hidden values whose rows are half of the expert apart. Units of
// all experts follow each other, and a tile may have those of two experts.
#pragma once
#include "block_rows.cuh"
#include "weights.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

constexpr int FP8_COLUMNS = 128;  // columns of a source, as of a block of scales
static_assert(FP8_COLUMNS == ROW_BYTES, "a stage has the columns of a source");
constexpr int FP8_STAGE_BYTES = STAGE_BYTES + TILE_ROWS * 4;  // rows, then a scale of each

/// Work of a block in one product.
struct Fp8Share {
  int begin, end;  // units of GEMM 1, rows of GEMM 2
  int height;      // units or rows in a tile
  int chunks;      // chunks in a row of weights
  int sources;

  __device__ __forceinline__ int Tiles() const { return (end - begin + height - 1) / height; }
  /// Return how many sources a warp has.
  __device__ __forceinline__ int Passes(int warp) const { return (sources - warp + FP8_WARPS - 1) / FP8_WARPS; }
};

/// Shares of both products, and sizes that the copy order of them needs.
struct Fp8Work {
  const int32_t* active;  // local numbers of the experts in use, ascending; shared memory
  int count;
  int units;  // units per expert
  bool is_gated;
  Fp8Share first, second;

  __device__ __forceinline__ Fp8Work(const MonoParams& p, const int32_t* active_, int count_)
      : active(active_), count(count_), is_gated(IsGated(p.activation.type)) {
    units = is_gated ? p.intermediate : p.intermediate / 2;
    ShareRows(count * units, int(blockIdx.x), first.begin, first.end);
    int from_end, to_end;  // the last blocks have more of GEMM 2, as the first ones have of GEMM 1
    ShareRows(p.hidden, int(gridDim.x - 1 - blockIdx.x), from_end, to_end);
    second.begin = p.hidden - to_end, second.end = p.hidden - from_end;
    first.height = TILE_ROWS / 2, second.height = TILE_ROWS;
    first.chunks = first.sources = (p.hidden + FP8_COLUMNS - 1) / FP8_COLUMNS;
    second.chunks = (p.intermediate + FP8_COLUMNS - 1) / FP8_COLUMNS, second.sources = count * second.chunks;
  }
};

/// Requests the stages of a warp one after another: batches of tiles, the sources of the warp, the tiles of the batch.
/// Batches::Tiles(product): tiles whose sums are in shared memory at once.
template <bool IS_BLOCK, typename Batches>
class Fp8Requests : public Batches {
 public:
  const Fp8Work work;  // here, because a reference to another member would keep both in local memory

  __device__ __forceinline__ Fp8Requests(const MonoParams& p, const int32_t* active, int count, const Batches& batches)
      : Batches(batches), work(p, active, count), p_(p), warp_(int(threadIdx.x) / 32) {
    EnterProduct(1);
  }

  /// Begin to copy the next stage, if there is one.
  __device__ __forceinline__ void Next(uint32_t stage) {
    if (product_ <= 2) {
      Copy(stage);
      if (++at_ < limit_) {
        Advance();
      } else {
        EnterNext();
      }
    }
    ptx::CopyCommit();
  }

 private:
  /// Return the lower of two rows that a lane copies: `j` is 0 or 1. The others are 8 further in the tile.
  __device__ __forceinline__ static int RowOf(int j) { return int(threadIdx.x) % 32 / 8 + 4 * j; }

  __device__ __forceinline__ void Copy(uint32_t stage) const {
    const int lane = int(threadIdx.x) % 32, unit = lane % 8;
    const uint32_t to = InStage(stage, RowOf(0), unit);
    const int upper = product_ == 1 ? 0 : 8;  // distance of the upper rows in `left_`
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // what another row has been stays, if there is none; nobody reads its sums
      const int j = i % 2, h = i / 2;
      if (RowOf(j) + h * upper < left_) {
        ptx::CopyAsync16(to + (4 * j + 8 * h) * ROW_BYTES, from_[j] + h * second_, has_column_);
      }
    }
    if (!IS_BLOCK || unit >= 4) return;
    const int j = unit % 2, h = unit / 2;  // the row whose scale this lane copies
    if (RowOf(j) + h * upper >= left_) return;
    const int row = first_row_ + row_[0] + (j == 0 ? 0 : row_[1] - row_[0]) + h * second_row_;
    ptx::CopyAsync4(stage + STAGE_BYTES + (RowOf(j) + 8 * h) * 4, scales_ + row / FP8_COLUMNS * scales_row_);
  }

  /// Find the addresses of tile `at_` of the source.
  __device__ __forceinline__ void Enter() {
    const int source = pass_ * FP8_WARPS + warp_, lane = int(threadIdx.x) % 32;
    const bool is_first = product_ == 1;
    const int columns = is_first ? p_.hidden : p_.intermediate;
    const int of_second = is_first ? 0 : source / work.second.chunks;
    const int begin = (is_first ? work.first.begin : work.second.begin) + at_ * Height();
    chunk_ = source - of_second * work.second.chunks;
    column_ = chunk_ * FP8_COLUMNS + lane % 8 * 16, has_column_ = column_ < columns;
    left_ = (is_first ? work.first.end : work.second.end) - begin;
    rows_ = is_first ? (work.is_gated ? 2 : 1) * p_.intermediate : p_.hidden, row_bytes_ = columns;
    first_row_ = is_first && work.is_gated ? p_.intermediate : 0;  // gate rows lie behind up rows
    second_row_ = !is_first ? 8 : work.is_gated ? -p_.intermediate : work.units;
    second_ = int64_t(second_row_) * row_bytes_;
    scales_row_ = (columns + FP8_COLUMNS - 1) / FP8_COLUMNS;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = begin + RowOf(j);
      const int expert = is_first ? min(at / work.units, work.count - 1) : of_second;
      row_[j] = is_first ? at - expert * work.units : at;
      EnterExpert(j, expert);
    }
  }

  __device__ __forceinline__ void EnterExpert(int j, int active) {
    const int64_t expert = work.active[active];
    const bool is_first = product_ == 1;
    active_[j] = active;
    from_[j] = static_cast<const unsigned char*>(is_first ? p_.fc1 : p_.fc2) +
               (expert * rows_ + first_row_ + row_[j]) * row_bytes_ + column_;
    if (IS_BLOCK && int(threadIdx.x) % 2 == j) {
      const int64_t blocks = int64_t((rows_ + FP8_COLUMNS - 1) / FP8_COLUMNS) * scales_row_;
      scales_ = static_cast<const float*>(is_first ? p_.fc1_scales : p_.fc2_scales) + expert * blocks + chunk_;
    }
  }

  /// Go on to the next tile of the source.
  __device__ __forceinline__ void Advance() {
    const int height = Height();
    left_ -= height;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      row_[j] += height, from_[j] += height * row_bytes_;
      if (product_ == 1 && row_[j] >= work.units) {
        int expert = active_[j];
        while (row_[j] >= work.units && expert < work.count - 1) row_[j] -= work.units, ++expert;
        EnterExpert(j, expert);
      }
    }
  }

  /// Go on behind a batch of tiles of a source.
  __device__ __forceinline__ void EnterNext() {
    const bool is_first = product_ == 1;
    const int tiles = is_first ? work.first.Tiles() : work.second.Tiles();
    if (++pass_ < (is_first ? work.first.Passes(warp_) : work.second.Passes(warp_))) {
      at_ = batch_;
    } else {
      pass_ = 0, batch_ = at_;
      if (at_ == tiles) {
        EnterProduct(product_ + 1);
        return;
      }
      limit_ = min(batch_ + this->Tiles(product_), tiles);
    }
    Enter();
  }

  /// Begin with a product of which the warp has stages, from `product` on.
  __device__ __forceinline__ void EnterProduct(int product) {
    const bool has_first = work.first.Tiles() > 0 && work.first.Passes(warp_) > 0;
    const bool has_second = work.second.Tiles() > 0 && work.second.Passes(warp_) > 0;
    product_ = product == 1 && has_first ? 1 : product <= 2 && has_second ? 2 : 3;
    pass_ = batch_ = at_ = 0;
    limit_ = min(this->Tiles(product_), product_ == 1 ? work.first.Tiles() : work.second.Tiles());
    if (product_ <= 2) Enter();
  }
  __device__ __forceinline__ int Height() const { return product_ == 1 ? TILE_ROWS / 2 : TILE_ROWS; }

  const MonoParams& p_;
  const int warp_;
  int product_, pass_, batch_, at_, limit_;  // product 3: no stage is left; limit_: tiles before the end of the batch
  int left_;                                 // units or rows from the tile on
  const unsigned char* from_[2];             // lower rows in the weights, at the columns of this lane
  int row_[2], active_[2];                   // their units or rows in the expert, which is number active_
  const float* scales_;         // scales of the expert of the row whose scale this lane copies, and of the chunk
  int64_t second_, row_bytes_;  // bytes to the upper rows, and from row to row
  int rows_, first_row_, second_row_, scales_row_, chunk_, column_;
  bool has_column_;
};

}  // namespace mono
}  // namespace fused_moe
}  // namespace flashinfer
