// SPDX-License-Identifier: Apache-2.0
// Index scores on SM90: the keys that a block computes, request after request. All roles walk the same list.
#pragma once
#include "shape.h"

namespace flashinfer {
namespace indexer {
namespace sm90 {

/// Keys [begin, end) of one request; begin is a multiple of 256.
struct Segment {
  int request, begin, end;

  __device__ __forceinline__ int Tiles() const { return (end - begin + KEYS - 1) / KEYS; }
};

/// Segments of a block, found by one warp: rows i and i + 1 of the schedule bound its splits. A schedule of other lengths
/// gives other segments, within the lengths as they are now: never an access outside of tables or result.
class Segments {
 public:
  __device__ __forceinline__ explicit Segments(const MqaLogitsParams& p) : p_(p) {
    const int32_t* rows = p.schedule + 2 * int64_t(blockIdx.x);
    next_ = max(rows[0], 0), split_ = max(rows[1], 0);
    last_ = rows[2], last_splits_ = rows[3];
    end_ = min(p.batch, last_splits_ > 0 && last_ < p.batch ? last_ + 1 : last_);
    // Lengths of a small batch do not wait for the rows of the schedule: both are on their way at once.
    if (p.batch <= GROUPS * 32) {
      Load(0);
    } else if (next_ < end_) {
      Load(next_);
    }
  }

  /// Find the next segment. Called by all lanes of a warp; false after the last one.
  __device__ __forceinline__ bool Next(Segment& segment) {
    while (next_ < end_) {
      const int index = next_ - base_;
      int request = -1, length = 0;
#pragma unroll
      for (int i = GROUPS - 1; i >= 0; --i) {
        const int from = index - 32 * i;  // bits below belong to requests that are done
        const uint32_t open = from >= 32 ? 0u : from > 0 ? ~0u << from : ~0u;
        const uint32_t found = __ballot_sync(~0u, length_[i] > 0) & open;
        const int lane = __ffs(found) - 1, there = __shfl_sync(~0u, length_[i], max(lane, 0));
        if (found != 0) request = base_ + 32 * i + lane, length = there;
      }
      if (request < 0) {
        next_ = base_ + GROUPS * 32, split_ = 0;
        if (next_ < end_) Load(next_);
        continue;
      }
      if (request >= end_) break;
      const int64_t begin = request == next_ ? int64_t(split_) * SPLIT : 0;
      const int64_t limit = request == last_ ? int64_t(last_splits_) * SPLIT : length;
      next_ = request + 1, split_ = 0;
      if (begin >= length || begin >= limit) continue;
      segment = Segment{request, int(begin), int(limit < length ? limit : length)};
      return true;
    }
    next_ = end_;
    return false;
  }

 private:
  static constexpr int GROUPS = 4;  // groups of 32 lengths that are loaded at once: empty requests cost no wait each

  __device__ __forceinline__ void Load(int base) {
    base_ = base;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      const int request = base_ + 32 * i + int(threadIdx.x) % 32;
      length_[i] = request < p_.batch ? LengthOf(p_, request) : 0;
    }
  }

  const MqaLogitsParams& p_;
  int next_, split_, last_, last_splits_, end_;
  int base_ = 0, length_[GROUPS] = {};
};

}  // namespace sm90
}  // namespace indexer
}  // namespace flashinfer
