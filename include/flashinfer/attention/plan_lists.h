// SPDX-License-Identifier: Apache-2.0
// What the work planner (plan.h) takes and makes.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "params.h"

namespace flashinfer {
namespace attention {

constexpr int32_t PLAN_INFO_SIZE = 15;
constexpr int32_t TICKETS = 1;  ///< numbers of WorkList::tickets; WorkList::arrivals are behind them

struct PlanInput {
  int32_t batch_size;
  const int32_t* qo_indptr;  ///< [batch + 1], or null: `uniform_qo_len` rows each
  int32_t uniform_qo_len;
  const int32_t* kv_indptr;  ///< [batch + 1] pages or tokens
  const int32_t* kv_lens;    ///< [batch] keys, or null: every page may be full and the device knows
  int32_t max_kv_len;        ///< without kv_lens: keys that no request exceeds; 0: those of its pages
  int32_t page_size;         ///< 1 for ragged keys
  int32_t num_qo_heads, num_kv_heads, head_dim_vo;
  bool causal;
  int32_t window_left;
  int32_t fixed_split;  ///< keys per split, or <= 0. With it, or without splits, a request's items ignore the batch
  bool disable_split;
  bool all_partial;  ///< tiles of one item have a slot and a merge too (pair.h)
  bool cuda_graph;
  int32_t max_rows;       ///< of q in any plan of this graph
  bool keeps_indptr;      ///< the plan has room for kv_indptr and qo_indptr, behind its header (IndptrOffset)
  int64_t float_bytes;    ///< of the float workspace, 0 if unknown: what fixed splits of a graph may grow to
  int32_t narrow_tile;    ///< rows of the tiles of either list; 0: the backend has none
  int32_t narrow_blocks;  ///< blocks resident at once
  bool takes_shares;      ///< narrow blocks that are done take further shares (WorkList::tickets)
  int32_t paired_blocks;  ///< likewise, next to blocks of the wide list in one launch (pair.h); 0: there is none
  int32_t wide_tiles[2];  ///< ascending; the second may be 0
  int32_t wide_blocks[2];
};

/// Where things are. Int offsets are in bytes from the start of the int workspace, float ones of the float workspace.
struct PlanInfo {
  int64_t int_bytes;
  int64_t float_bytes;
  int16_t has_shares;  ///< of the narrow list (WorkList)
  int16_t qo_len;      ///< with chunk_size, of WorkList::regular; what else that says follows from the counts
  int32_t chunk_size;  ///< 0: requests are cut differently
  int64_t tile;        ///< rows of a tile of the list with the larger tiles; index 3 of what Python sees
  int64_t keys;        ///< of all requests; 0 in a CUDA graph, where it changes
  int64_t narrow_items, narrow_tickets, narrow_merges, narrow_blocks, narrow_merge_blocks;
  int64_t wide_items, wide_merges, wide_blocks, wide_merge_blocks;
  int64_t wide_partial;  ///< the narrow ones are at 0

  void ToArray(int64_t* out) const { std::memcpy(out, this, sizeof(PlanInfo)); }
  static PlanInfo FromArray(const int64_t* in) {
    PlanInfo info;
    std::memcpy(&info, in, sizeof(PlanInfo));
    return info;
  }
};
static_assert(sizeof(PlanInfo) == PLAN_INFO_SIZE * sizeof(int64_t), "what Python stores");

/// Counts at the start of the int workspace, which kernels read; shares of the narrow list instead of items, if it has
/// them.
struct PlanHeader {
  int32_t narrow_items, narrow_merges, wide_items, wide_merges;
};

/// What a vector does, less its initialisation: a list that was long once takes long lists at no cost. It can be made in
/// memory of others, as long as that is large enough.
template <typename T>
class List {
 public:
  List() = default;
  List(const List&) = delete;
  List& operator=(const List&) = delete;

  void Clear() { size_ = 0; }
  /// From now on in `data`, which holds `capacity` elements, or if null in memory of its own. Forgets what it has.
  void Use(T* data, size_t capacity) {
    is_own_ = data == nullptr;
    data_ = is_own_ ? storage_.data() : data;
    capacity_ = is_own_ ? storage_.size() : capacity;
    size_ = 0;
  }
  void Reserve(size_t room) {
    if (room <= capacity_) return;
    if (room > storage_.size()) storage_.resize(room);
    if (!is_own_) std::copy(data_, data_ + size_, storage_.begin());
    is_own_ = true;
    data_ = storage_.data();
    capacity_ = storage_.size();
  }
  T& Push(const T& value) {
    if (size_ == capacity_) Reserve(2 * size_ + 64);
    return data_[size_++] = value;
  }
  void Resize(size_t size) {
    Reserve(size);
    size_ = size;
  }
  /// Room for `count` more elements, which the caller writes.
  T* Extend(size_t count) {
    if (size_ + count > capacity_) Reserve(2 * size_ + count + 64);
    size_ += count;
    return data_ + size_ - count;
  }
  size_t Size() const { return size_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }

 private:
  std::vector<T> storage_;
  bool is_own_ = true;
  T* data_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
};

struct PlanOutput {
  PlanInfo info;
  List<WorkItem> narrow, wide;
  int32_t shares;  ///< of the narrow list: its first items
  List<MergeItem> narrow_merges, wide_merges;
  List<WorkItem> tiles, sorted;  ///< scratch
  int32_t narrow_slots, wide_slots;

  void Clear() {
    narrow.Clear(), wide.Clear(), narrow_merges.Clear(), wide_merges.Clear();
    shares = narrow_slots = wide_slots = 0;
  }
};

inline int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t AlignUp(int64_t a) { return DivideUp(a, 16) * 16; }

/// Writes the narrow list, range by range: a range is a run of keys, maybe of several tiles, and its shares are those of
/// the heads. Those are neighbours, so that blocks which start side by side read memory that lies side by side.
class Shares {
 public:
  /// Of at most `ranges` ranges, whose first items are `items` in the beginning; `room` for those that follow.
  Shares(List<WorkItem>& items, int32_t ranges, size_t room) : items_(items), ranges_(ranges) {
    items.Reserve(size_t(ranges) + room);
    items.Resize(size_t(ranges));
  }
  /// The next range, whose number is returned.
  int32_t Begin() { return last_ = -1, count_++; }
  int32_t Count() const { return count_; }
  /// A copy of `tile` as the newest item of the range, to be changed where it is.
  WorkItem& Push(const WorkItem& tile) {
    int32_t at = count_ - 1;
    if (last_ >= 0) {
      at = items_[last_].next = int32_t(items_.Size());
      items_.Extend(1);
    }
    return items_[last_ = at] = tile;
  }
  /// Ranges that have items. Those that there was room for get one that says that there is nothing to do.
  int32_t End() {
    const int32_t used = last_ >= 0 ? count_ : count_ - 1;
    WorkItem none{};
    none.request = none.slot = none.merge = none.next = -1;
    std::fill(items_.begin() + used, items_.begin() + ranges_, none);
    return used;
  }

 private:
  List<WorkItem>& items_;
  const int32_t ranges_;
  int32_t count_ = 0, last_ = -1;  // ranges begun; the last item of the newest, -1: it has none
};

}  // namespace attention
}  // namespace flashinfer
