// SPDX-License-Identifier: Apache-2.0
// The items of a block of the Hopper prefill kernel. One thread of the producer takes the next item from a counter that
// all blocks share, and hands it to the other warps of its block through a ring in shared memory. Blocks that finish
// early take more items, so any order of the list is balanced: the order can follow the L2 cache (WorkList::is_by_head).
#pragma once
#include "shape.cuh"
#include "../common/work_items.cuh"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

/// Steps of KEYS keys of an item; they are taken last to first.
template <int KEYS>
__device__ __forceinline__ int StepsOf(const WorkItem& item) {
  return max(0, (item.kv_end - item.kv_start + KEYS - 1) / KEYS);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

/// Reader of the ring of items, for one warp.
template <typename Tr>
class ItemReader {
 public:
  __device__ __forceinline__ explicit ItemReader(const Shared<Tr>& shared) : shared_(shared) {}

  /// Get the next item. Returns false after the last one.
  __device__ __forceinline__ bool Next(WorkItem& item) {
    shared_.ItemBarriers().WaitFull(at_);
    float4* to = reinterpret_cast<float4*>(&item);
#pragma unroll
    for (int i = 0; i < Tr::ITEM_BYTES / 16; ++i) to[i] = ptx::LoadShared16(shared_.Item(at_.stage) + 16 * i);
    __syncwarp();
    shared_.ItemBarriers().Release(at_.stage, 1);
    at_.Advance();
    return item.request >= 0;
  }

 private:
  const Shared<Tr> shared_;
  hopper::RingPosition<2> at_;
};

/// Copy item `index` of a list (ListItem) to shared memory, 16 bytes at a time: the producer has few registers.
template <typename Params>
__device__ __forceinline__ void CopyListItem(const Params& p, const WorkList& work, int index, uint32_t to) {
  static_assert(offsetof(WorkItem, kv_head) == 4 && offsetof(WorkItem, kv_len) == 20 &&
                    offsetof(WorkItem, kv_end) == 32 && offsetof(WorkItem, slot) == 36,
                "the words that are set here");
  const int unit = p.kv_heads.Divide(index), head = index - unit * p.num_kv_heads;
  const uint4* from = reinterpret_cast<const uint4*>(work.items + unit);
  uint4 words = __ldg(from);
  const int request = int(words.x);
  words.y = (words.y & 0xffff0000u) | uint32_t(head);
  ptx::StoreShared16(to, words);
  words = __ldg(from + 1);
  if (int(words.y) < 0) words.y = uint32_t(p.get_kv_len(request));  // known on the device only
  const int kv_len = int(words.y);
  ptx::StoreShared16(to + 16, words);
  words = __ldg(from + 2);
  words.x = uint32_t(min(int(words.x), kv_len));
  if (int(words.y) >= 0) words.y += uint32_t(head);
  ptx::StoreShared16(to + 32, words);
}

/// Writer of the ring of items, for one thread: Take() and Publish() in turn, until the end of the list is published.
template <typename Tr>
class ItemWriter {
 public:
  using Params = typename Tr::Params;
  __device__ __forceinline__ ItemWriter(const Params& p, const WorkList& work, const Shared<Tr>& shared)
      : p_(p),
        work_(work),
        shared_(shared),
        units_(work.items == nullptr ? work.blocks / p.num_kv_heads : *work.num_items),
        taken_(int(blockIdx.x) - work.late_blocks) {}

  /// True for a block whose first item is that of a ticket.
  __device__ __forceinline__ bool IsLate() const { return int(blockIdx.x) < work_.late_blocks; }

  /// Begin to take the next item; the first one is taken already, unless the block is late. The counter answers while the producer loads keys.
  __device__ __forceinline__ void Take() {
    if (work_.tickets != nullptr) {
      taken_ = atomicAdd(work_.tickets, 1);
    } else {
      taken_ += int(gridDim.x);
    }
  }

  /// Publish the item taken last, or the end of the list.
  __device__ __forceinline__ void Publish() {
    const int count = units_ * p_.num_kv_heads;
    int index = taken_;
    if (work_.tickets != nullptr && (published_ > 0 || IsLate())) {
      // All blocks together draw `count` tickets, and late blocks one more each; this is the last one.
      if (index == count + work_.late_blocks - 1) *work_.tickets = 0;
      index += int(gridDim.x) - work_.late_blocks;
    }
    const hopper::RingPosition<2> place{int(published_ % 2), published_ / 2 % 2};
    shared_.ItemBarriers().WaitEmpty(place);
    const uint32_t to = shared_.Item(place.stage);
    if (index >= count) {
      ptx::StoreShared16(to, uint4{uint32_t(-1), 0, 0, 0});
    } else if (!Tr::MAY_BE_SINGLE || work_.items != nullptr) {
      CopyListItem(p_, work_, work_.is_by_head ? ByHead(index) : index, to);
    } else {
      const WorkItem item = SingleRequestItem<Tr::TILE>(p_, work_, work_.is_by_head ? ByHead(index) : index);
      const uint4* from = reinterpret_cast<const uint4*>(&item);
#pragma unroll
      for (int i = 0; i < Tr::ITEM_BYTES / 16; ++i) ptx::StoreShared16(to + 16 * i, from[i]);
    }
    ptx::MbarrierArrive(shared_.ItemBarriers().Full(place.stage));
    ++published_;
  }

 private:
  /// Index of the item if all items of a head precede those of the next head.
  __device__ __forceinline__ int ByHead(int index) const {
    const int head = index / units_;
    return (index - head * units_) * p_.num_kv_heads + head;
  }

  const Params& p_;
  const WorkList& work_;
  const Shared<Tr> shared_;
  const int units_;  // items per head
  int taken_;        // index of the first item, or ticket of another one
  uint32_t published_ = 0;
};

#endif

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
