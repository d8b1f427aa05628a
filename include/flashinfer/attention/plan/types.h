// SPDX-License-Identifier: Apache-2.0
// Input and output types of the work planner (planner.h).
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../common/params.h"

namespace flashinfer {
namespace attention {

constexpr int32_t PLAN_INFO_SIZE = 15;
constexpr int32_t TICKETS = 2;  ///< WorkList::tickets of the decode and of the prefill list; WorkList::arrivals follow

struct PlanInput {
  int32_t batch_size;
  const int32_t* qo_indptr;  ///< [batch + 1], or null: every request has `uniform_qo_len` rows
  int32_t uniform_qo_len;
  const int32_t* kv_indptr;  ///< [batch + 1] pages or tokens
  const int32_t* kv_lens;    ///< [batch] keys, or null: only the device knows them, and every page may be full
  int32_t max_kv_len;        ///< upper bound of the keys of a request without kv_lens; 0: bounded by its pages
  int32_t page_size;         ///< 1 for ragged keys
  int32_t num_qo_heads, num_kv_heads, head_dim_vo;
  bool causal;
  int32_t window_left;
  int32_t
      fixed_split;  ///< keys per split, or <= 0. With it (or disable_split) the items of a request do not depend on the batch
  bool disable_split;
  bool all_partial;  ///< tiles of a single item get a slot and a merge too (fused/plan.h)
  bool cuda_graph;
  int32_t max_rows;          ///< upper bound of the rows of q over all plans of this graph
  bool publishes_works;      ///< the plan ends with the arrays of PublishedWorks
  bool keeps_indptr;         ///< the plan stores kv_indptr and qo_indptr after its header (IndptrOffset)
  int64_t float_bytes;       ///< size of the float workspace, 0 if unknown; bounds the fixed splits of a graph
  int32_t decode_tile;       ///< rows of a decode tile; 0: the backend has no decode kernel
  int32_t decode_blocks;     ///< resident blocks of the decode kernel
  bool takes_shares;         ///< decode blocks that finish early take further shares (WorkList::tickets)
  int32_t fused_blocks;      ///< resident decode blocks beside prefill blocks in a fused launch; 0: no fused kernel.
                             ///< With takes_items: decode blocks of all SMs, instead of prefill blocks
  bool takes_items;          ///< prefill blocks take items from a counter, so that any order of the list is balanced
  int32_t prefill_tiles[2];  ///< rows of the prefill tiles, ascending; the second may be 0. With takes_items: those of
                             ///< the usual form and of the form for short items (Planner::ChooseForm)
  int32_t prefill_blocks[2];
};

/// Layout of a plan. Integer offsets are bytes from the start of the int workspace; float offsets are bytes from the
/// start of the float workspace.
struct PlanInfo {
  int64_t int_bytes;
  int64_t float_bytes;
  bool has_shares;     ///< WorkList::has_shares of the decode list
  bool is_by_head;     ///< WorkList::is_by_head of the prefill list
  int16_t qo_len;      ///< with chunk_size: WorkList::equal_requests; its other fields follow from the counts
  int32_t chunk_size;  ///< 0: the requests are not split alike
  int64_t tile;        ///< rows of the larger tile in use; Python reads it as index 3
  int64_t keys;        ///< keys of all requests; 0 in a CUDA graph, where the number changes
  int64_t decode_items, decode_tickets, decode_merges, decode_blocks, decode_merge_blocks;
  int64_t prefill_items, prefill_merges, prefill_blocks, prefill_merge_blocks;
  int64_t prefill_partial;  ///< offset of the partial states of the prefill list; those of the decode list are at 0

  void ToArray(int64_t* out) const { std::memcpy(out, this, sizeof(PlanInfo)); }
  static PlanInfo FromArray(const int64_t* in) {
    PlanInfo info;
    std::memcpy(&info, in, sizeof(PlanInfo));
    return info;
  }
};
static_assert(sizeof(PlanInfo) == PLAN_INFO_SIZE * sizeof(int64_t), "what Python stores");

inline int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t AlignUp(int64_t a) { return DivideUp(a, 16) * 16; }

/// Arrays of int32 at the end of a plan of MLA, which serving engines read, and of which they rewrite `kv_end`. A work is
/// an item of the decode list or, after `prefill` entries, of the prefill list. Offsets are bytes from the start of the
/// int workspace; they are the same for all plans of a CUDA graph.
struct PublishedWorks {
  int64_t capacity;     ///< entries of the first three arrays
  int64_t prefill;      ///< first entry of the prefill list
  int64_t q_indptr;     ///< first row of the request in q
  int64_t kv_start;     ///< first key
  int64_t kv_end;       ///< end of the keys; a smaller number leaves out keys, down to none
  int64_t work_indptr;  ///< 0, number of works

  PublishedWorks(int64_t begin, int64_t decode_items, int64_t prefill_items)
      : capacity(decode_items + prefill_items), prefill(decode_items) {
    const int64_t bytes = AlignUp(capacity * int64_t(sizeof(int32_t)));
    q_indptr = begin, kv_start = begin + bytes, kv_end = begin + 2 * bytes, work_indptr = begin + 3 * bytes;
  }
  int64_t End() const { return work_indptr + AlignUp(2 * sizeof(int32_t)); }

  /// Arrays of a plan that has them. The lists of items are as long as the places between the offsets.
  static PublishedWorks Of(const PlanInfo& info) {
    const int64_t decode = (info.decode_tickets - info.decode_items) / int64_t(sizeof(WorkItem));
    const int64_t prefill = (info.prefill_merges - info.prefill_items) / int64_t(sizeof(WorkItem));
    return PublishedWorks(info.int_bytes - PublishedWorks(0, decode, prefill).End(), decode, prefill);
  }
};
static_assert(sizeof(WorkItem) % 16 == 0, "a list ends where its last item does");

/// Counts at the start of the int workspace, which kernels read. decode_items is the number of shares if the list has
/// them.
struct PlanHeader {
  int32_t decode_items, decode_merges, prefill_items, prefill_merges;
};

/// Vector without initialisation: a list that was long once stays allocated. It can be placed in memory of the caller
/// as long as that is large enough.
template <typename T>
class List {
 public:
  List() = default;
  List(const List&) = delete;
  List& operator=(const List&) = delete;

  void Clear() { size_ = 0; }
  /// Use the memory `data` of `capacity` elements, or the list's own memory if null. Discards the contents.
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
  /// Append `count` uninitialised elements, which the caller writes.
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
  List<WorkItem> decode, prefill;
  int32_t shares;  ///< number of shares: the first items of the decode list are their heads
  List<MergeItem> decode_merges, prefill_merges;
  List<WorkItem> tiles, sorted;  ///< scratch
  int32_t decode_slots, prefill_slots;
  bool publishes_works;  ///< PlanInput::publishes_works

  void Clear() {
    decode.Clear(), prefill.Clear(), decode_merges.Clear(), prefill_merges.Clear();
    shares = decode_slots = prefill_slots = 0;
  }
};

/// Writer of the decode list, range by range. A range is a run of keys, possibly of several tiles; its shares are those
/// of the KV heads. Shares of neighbouring heads are adjacent, so that blocks that start together read adjacent memory.
class Shares {
 public:
  /// Writer of at most `ranges` ranges, whose first items come first in `items`; reserves `room` for the others.
  Shares(List<WorkItem>& items, int32_t ranges, size_t room) : items_(items), ranges_(ranges) {
    items.Reserve(size_t(ranges) + room);
    items.Resize(size_t(ranges));
  }
  /// Begin the next range and return its number.
  int32_t Begin() { return last_ = -1, count_++; }
  int32_t Count() const { return count_; }
  /// Append a copy of `tile` to the current range; the caller modifies it in place.
  WorkItem& Push(const WorkItem& tile) {
    int32_t at = count_ - 1;
    if (last_ >= 0) {
      at = items_[last_].next = int32_t(items_.Size());
      items_.Extend(1);
    }
    return items_[last_ = at] = tile;
  }
  /// Finish and return the number of ranges that have items. Unused ranges get an item without work.
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
  int32_t count_ = 0, last_ = -1;  // number of ranges begun; last item of the newest range, -1: none
};

}  // namespace attention
}  // namespace flashinfer
