// SPDX-License-Identifier: Apache-2.0
// Pinned memory that plans are written to before they are copied to the device. It belongs to the module and never to
// a wrapper or to torch: a wrapper may be gone, and its memory given to another, long before a busy stream has run the
// copy. A block is written again only after the event behind its copy has completed.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>
// clang-format off
#ifndef FLASHINFER_CPU
#include <cuda_runtime.h>
#endif
// clang-format on

namespace flashinfer {
namespace attention {

/// Blocks for the plans of one device; any thread may ask for one. `Runtime` is CUDA's (below) or that of a test.
template <typename Runtime>
class StagingPool {
 public:
  using Stream = typename Runtime::Stream;
  static constexpr int64_t MIN_BYTES = 64 << 10;  ///< bytes per block: plans of a few hundred requests
  static constexpr int64_t MAX_BYTES = 256
                                       << 20;  ///< bytes of all blocks, beyond which a plan waits for an earlier copy
  static constexpr int MAX_PROBES = 4;         ///< events that are asked before memory is allocated

  struct Block {
    char* data;
    int64_t bytes;
    typename Runtime::Event copied;
  };

  /// A block that nobody reads, of at least `bytes`; null if there is no memory. It must be given back.
  Block* Take(int64_t bytes) {
    const typename Runtime::AnyCall scope;
    const std::lock_guard<std::mutex> lock(mutex_);
    Block* block = FindFree(bytes);
    if (block == nullptr) {
      Reclaim();
      block = FindFree(bytes);
    }
    if (block == nullptr && total_ + SizeFor(bytes) <= MAX_BYTES) block = Allocate(bytes);
    while (block == nullptr && !pending_.empty()) {
      Runtime::Wait(pending_.front()->copied);
      free_.push_back(pending_.front());
      pending_.pop_front();
      block = FindFree(bytes);
    }
    return block != nullptr ? block : Allocate(bytes);
  }

  /// Give back a block that nothing was copied from.
  void GiveBack(Block* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(block);
  }

  /// Give back a block whose first `bytes` are copied by what was last put on `stream`. A copy that was captured is made
  /// again by each replay, and one without an event may never be known to have run: such blocks are not used again.
  void GiveBackAfter(Block* block, int64_t bytes, Stream stream) {
    if (Runtime::IsCapturing(stream) || !Runtime::Record(block->copied, stream)) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    pending_.push_back(block);
    last_bytes_ = bytes;
  }

  /// Bytes of the last plan: what to ask for while those of the next are not known.
  int64_t LastBytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return last_bytes_;
  }

 private:
  static int64_t SizeFor(int64_t bytes) {
    int64_t size = MIN_BYTES;
    while (size < bytes) size *= 2;
    return size;
  }

  /// The one given back last, which is most likely in the cache.
  Block* FindFree(int64_t bytes) {
    for (auto at = free_.rbegin(); at != free_.rend(); ++at) {
      Block* const block = *at;
      if (block->bytes < bytes) continue;
      free_.erase(std::next(at).base());
      return block;
    }
    return nullptr;
  }

  /// Ask for the blocks that have waited longest. One whose stream is still busy goes to the end, so that it does not
  /// hide those of other streams.
  void Reclaim() {
    for (size_t i = std::min<size_t>(MAX_PROBES, pending_.size()); i > 0; --i) {
      Block* const block = pending_.front();
      pending_.pop_front();
      if (Runtime::IsDone(block->copied)) {
        free_.push_back(block);
      } else {
        pending_.push_back(block);
      }
    }
  }

  Block* Allocate(int64_t bytes) {
    const int64_t size = SizeFor(bytes);
    Block block{nullptr, size, {}};
    if (!Runtime::Allocate(block.data, size, block.copied)) return nullptr;
    total_ += size;
    return new Block(block);  // to the end of the process, when the driver may be gone before static objects are
  }

  std::mutex mutex_;
  std::vector<Block*> free_;
  std::deque<Block*> pending_;
  int64_t total_ = 0, last_bytes_ = 0;
};

/// A block from the pool for as long as a plan is made. If an exception ends that, nothing reads the block.
template <typename Runtime>
class Staging {
 public:
  using Pool = StagingPool<Runtime>;

  explicit Staging(Pool& pool) : pool_(pool) {}
  Staging(const Staging&) = delete;
  ~Staging() {
    for (auto* block : {block_, earlier_}) {
      if (block != nullptr) pool_.GiveBack(block);
    }
  }

  /// Room for `bytes`, or null. What was written to room asked for before is still where it was written.
  char* Room(int64_t bytes) {
    if (block_ == nullptr || block_->bytes < bytes) {
      if (earlier_ != nullptr) pool_.GiveBack(earlier_);
      earlier_ = block_;
      block_ = pool_.Take(bytes);
    }
    return block_ != nullptr ? block_->data : nullptr;
  }
  /// Room for a plan whose size is not known yet: as much as the last one took.
  char* Room() { return Room(std::max<int64_t>(pool_.LastBytes(), 1)); }

  int64_t bytes() const { return block_ != nullptr ? block_->bytes : 0; }

  /// Say that `bytes` of the last room are copied by what was last put on `stream`.
  void CopiedBy(typename Runtime::Stream stream, int64_t bytes) {
    pool_.GiveBackAfter(block_, bytes, stream);
    block_ = nullptr;
  }

 private:
  Pool& pool_;
  typename Pool::Block *block_ = nullptr, *earlier_ = nullptr;
};

#ifndef FLASHINFER_CPU
/// CUDA as StagingPool sees it. The device whose pool it is must be current.
struct CudaStaging {
  using Event = cudaEvent_t;
  using Stream = cudaStream_t;

  /// While it exists, this thread may allocate and ask for events although another thread captures a graph.
  class AnyCall {
   public:
    AnyCall() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~AnyCall() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    AnyCall(const AnyCall&) = delete;

   private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  };

  static bool Allocate(char*& data, int64_t bytes, Event& event) {
    void* memory = nullptr;
    if (cudaHostAlloc(&memory, size_t(bytes), cudaHostAllocPortable) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) {
      cudaGetLastError();
      cudaFreeHost(memory);
      return false;
    }
    data = static_cast<char*>(memory);
    return true;
  }

  static bool IsDone(Event event) {
    if (cudaEventQuery(event) == cudaSuccess) return true;
    cudaGetLastError();  // "not ready" is no error
    return false;
  }

  static void Wait(Event event) { cudaEventSynchronize(event); }
  static bool Record(Event event, Stream stream) { return cudaEventRecord(event, stream) == cudaSuccess; }

  static bool IsCapturing(Stream stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
  }
};

/// Return the pool of a device, which is never freed; null if the device has none.
inline StagingPool<CudaStaging>* StagingPoolOf(int device) {
  constexpr int MAX_DEVICES = 64;
  static auto* const all = new StagingPool<CudaStaging>[MAX_DEVICES];
  return device >= 0 && device < MAX_DEVICES ? &all[device] : nullptr;
}
#endif

}  // namespace attention
}  // namespace flashinfer
