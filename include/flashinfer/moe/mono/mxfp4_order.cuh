// SPDX-License-Identifier: Apache-2.0
// Order in which a warp of mxfp4_one.cuh copies weights to its ring.
//
// Rows are divided by eights: the half of a block of w4_layout.h that 16 lanes have, rows 0 to 3 and 8 to 11, or 4 to
// 7 and 12 to 15, of 16. Half a warp has a source of its own: an expert and 128 columns, of all the rows of the
// block. A stage has two eights that follow each other, of the sources of both halves: 1 KB in a row, where both are
// of one block. Stages of gated weights are gate and up of the same rows, in turns.
#pragma once
#include "../../gemm/w4_layout.h"
#include "../../ptx/cp_async.cuh"
#include "block_rows.cuh"
#include "experts_of_one.cuh"

namespace flashinfer {
namespace fused_moe {
namespace mono {

constexpr int EIGHT = 8;                                // rows that are not divided
constexpr int SOURCE_COLUMNS = 128, PART_BYTES = 1024;  // codes of an eight of both halves of a warp
constexpr int PAIR_BYTES =
    2 * PART_BYTES + 2 * 2 * EIGHT * 4;  // a stage: codes (2, 1024), scales (source, 2, 8 rows, 4)
constexpr int BATCH = 16;                // stages of a source whose sums are in shared memory at once

/// Return the row of number `r` of an eight.
__device__ __forceinline__ int RowOf(int eight, int r) { return eight / 2 * 16 + r / 4 * 8 + eight % 2 * 4 + r % 4; }

/// Work of a block in one product.
struct Portion {
  int begin, end;  // GEMM 1: 16 hidden values, of all experts; GEMM 2: eights
  int chunks;      // pieces of 128 columns of a row
  int sources;     // GEMM 1: those of an expert; GEMM 2: those of all experts
  int passes;      // rounds in which all half warps take a source each
};

/// The shares of both products.
template <int HALVES>
struct Shares {
  Portion first, second;
  int pairs_per_expert;  // pairs of eights of hidden values
  bool is_gated;

  __device__ __forceinline__ Shares(const MonoParams& p, int experts) : is_gated(IsGated(p.activation.type)) {
    pairs_per_expert = p.intermediate / (2 * EIGHT);
    ShareRows(experts * pairs_per_expert, int(blockIdx.x), first.begin, first.end);
    ShareRows(p.hidden / EIGHT, int(gridDim.x - 1 - blockIdx.x), second.begin,
              second.end);  // blocks with more of GEMM 1 have less here
    const int eights = p.hidden / EIGHT, begin = second.begin;
    second.begin = eights - second.end, second.end = eights - begin;
    first.chunks = first.sources = p.hidden / SOURCE_COLUMNS;
    second.chunks = p.intermediate / SOURCE_COLUMNS, second.sources = experts * second.chunks;
    first.passes = max(1, (first.sources + HALVES - 1) / HALVES);
    second.passes = max(1, (second.sources + HALVES - 1) / HALVES);
  }
  /// Return the stages that 16 hidden values take.
  __device__ __forceinline__ int StagesOfPair() const { return is_gated ? 2 : 1; }
  /// Return the number of the 16 hidden values of a stage.
  __device__ __forceinline__ int PairOf(int stage) const { return first.begin + (is_gated ? stage / 2 : stage); }
  /// Return the stages of a source in a product.
  __device__ __forceinline__ int Stages(int product) const {
    return product == 1 ? (first.end - first.begin) * StagesOfPair() : (second.end - second.begin + 1) / 2;
  }
};

/// Requests the stages of a warp one after another: batches of stages, the passes of a batch, the stages of a pass.
template <int HALVES>
class Requests {
 public:
  const Shares<HALVES> shares;  // here, because a reference to another member would keep both in local memory

  __device__ __forceinline__ Requests(const MonoParams& p, const TokenExperts& experts, int count)
      : shares(p, count), p_(p), experts_(experts), half_(int(threadIdx.x) / 16) {
    if (shares.Stages(1) > 0) {
      Enter();
    } else {
      EnterSecond();
    }
  }

  /// Begin to copy the next stage, if there is one.
  __device__ __forceinline__ void Next(uint32_t stage) {
    if (product_ <= 2) {
      if (has_source_) Copy(stage);
      codes_ += step_, step_ = two_steps_ - step_, eight_ += eights_, eights_ = two_eights_ - eights_;
      if (++at_ == limit_) EnterNext();
    }
    ptx::CopyCommit();
  }

 private:
  __device__ __forceinline__ void Copy(uint32_t stage) const {
    const int lane = int(threadIdx.x) % 32;
    const bool has_second = at_ < full_;
    const uint32_t to = stage + lane * 16;
    ptx::CopyAsync16(to, codes_, true);
    ptx::CopyAsync16(to + gemm::W4_BLOCK_BYTES, codes_ + gemm::W4_BLOCK_BYTES, true);
    if (has_second) {
      const auto* const from = codes_ + second_;
      ptx::CopyAsync16(to + PART_BYTES, from, true);
      ptx::CopyAsync16(to + PART_BYTES + gemm::W4_BLOCK_BYTES, from + gemm::W4_BLOCK_BYTES, true);
    }
    if (lane / EIGHT % 2 == 0 || has_second) {
      ptx::CopyAsync4(stage + 2 * PART_BYTES + lane * 4,
                      scales_ + (eight_ / 8 * scales_row_ + (eight_ % 2 * 16 + eight_ / 2 % 4) * 4));
    }
  }

  /// Find the addresses of a pass, from the stage `at_` on, up to the end of the batch or of the expert.
  __device__ __forceinline__ void Enter() {
    const bool is_first = product_ == 1, is_gated = is_first && shares.is_gated;
    const int source = pass_ * HALVES + half_, columns = is_first ? p_.hidden : p_.intermediate;
    const int lane = int(threadIdx.x) % 32;
    int64_t rows = p_.hidden;
    int active = 0, chunk = source, eight = shares.second.begin + 2 * at_;
    limit_ = min(batch_ + BATCH, shares.Stages(product_));
    full_ = (shares.second.end - shares.second.begin) / 2;
    int in_turns = 0;  // eights from a stage to the next one of the same rows
    if (is_first) {
      const int pair = shares.PairOf(at_), inner = p_.intermediate / EIGHT;
      active = pair / shares.pairs_per_expert;
      const int in_expert = pair - active * shares.pairs_per_expert;
      limit_ = min(limit_, at_ + (shares.pairs_per_expert - in_expert) * shares.StagesOfPair()), full_ = limit_;
      rows = is_gated ? 2 * p_.intermediate : p_.intermediate;
      eight = 2 * in_expert;
      if (is_gated) eight += inner, in_turns = -inner;  // gate, which is behind up, is first
    } else {
      active = source / shares.second.chunks, chunk = source - active * shares.second.chunks;
    }
    has_source_ = source < (is_first ? shares.first.sources : shares.second.sources);
    const int64_t expert = has_source_ ? experts_.expert[active] : 0;
    const int row = columns * 8;  // bytes of 16 rows
    codes_ = static_cast<const unsigned char*>(is_first ? p_.fc1 : p_.fc2) + expert * rows * (columns / 2) +
             int64_t(eight / 2) * row + eight % 2 * 256 + chunk * (2 * gemm::W4_BLOCK_BYTES) + lane % 16 * 16;
    second_ = eight % 2 == 0 ? 256 : row - 256;
    step_ = is_gated ? int64_t(in_turns / 2) * row : row, two_steps_ = is_gated ? row : 2 * row;
    eights_ = is_gated ? in_turns : 2, two_eights_ = is_gated ? 2 : 4;
    eight_ = eight + lane / EIGHT % 2, scales_row_ = columns * 2;  // bytes of 64 rows
    scales_ = static_cast<const unsigned char*>(is_first ? p_.fc1_scales : p_.fc2_scales) +
              expert * rows * (columns / 32) + chunk * 256 + (lane / 4 % 2 * 8 + lane % 4) * 16;
  }

  /// Go on behind the stages of an expert or of a pass.
  __device__ __forceinline__ void EnterNext() {
    const int stages = shares.Stages(product_), passes = product_ == 1 ? shares.first.passes : shares.second.passes;
    if (at_ == min(batch_ + BATCH, stages)) {
      if (++pass_ < passes) {
        at_ = batch_;
      } else {
        pass_ = 0, batch_ = at_;
        if (at_ == stages) {
          if (product_ == 2) {
            product_ = 3;
          } else {
            EnterSecond();
          }
          return;
        }
      }
    }
    Enter();
  }

  __device__ __forceinline__ void EnterSecond() {
    product_ = 3, pass_ = 0, batch_ = 0, at_ = 0;
    if (shares.Stages(2) == 0) return;
    product_ = 2;
    Enter();
  }

  const MonoParams& p_;
  const TokenExperts& experts_;
  const int half_;                                               // number among the half warps of the block
  int product_ = 1, pass_ = 0, batch_ = 0, at_ = 0, limit_ = 0;  // stages of the block's share; product 3: none
  int full_ = 0;  // stages of these that have two parts; the last one of GEMM 2 may have one
  bool has_source_ = false;
  const unsigned char* codes_ = nullptr;              // codes of the next stage
  const unsigned char* scales_ = nullptr;             // scales of eight 0
  int second_ = 0;                                    // bytes from part 0 to part 1
  int64_t step_ = 0;                                  // bytes to the next stage
  int two_steps_ = 0;                                 // bytes to the stage behind it
  uint32_t eight_ = 0, eights_ = 0, two_eights_ = 0;  // the eight whose scales this lane copies, and its steps
  uint32_t scales_row_ = 0;
};

}  // namespace mono
}  // namespace fused_moe
}  // namespace flashinfer
