// SPDX-License-Identifier: Apache-2.0
// Per-stream scratch and counters for calls without plan(). Reuse is safe because launches on one stream are ordered.
#pragma once
#include "tvm_ffi_utils.h"
// clang-format off
#include <map>
#include <mutex>
// clang-format on

namespace flashinfer {

/// Memory of the streams of one device. It is never freed: at process exit the driver may be gone before static objects
/// are destroyed. `Runtime` is CUDA's (below) or that of a test.
template <typename Runtime>
class StreamMemory {
 public:
  using Stream = typename Runtime::Stream;
  static constexpr int64_t COUNTERS = 512;         ///< counters per stream
  static constexpr int64_t MIN_BYTES = 256 << 10;  ///< scratch bytes per stream, doubled as often as necessary
  static constexpr size_t MAX_STREAMS = 16;

  struct Place {
    int32_t* counters = nullptr;
    void* scratch = nullptr;
    int64_t bytes = 0;
    bool is_lent = false;
  };

  /// Return COUNTERS numbers, initially 0; null if there are none.
  int32_t* Counters(Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Place* const place = Find(stream);
    if (place == nullptr) return nullptr;
    if (place->counters == nullptr) {
      constexpr int64_t BYTES = COUNTERS * sizeof(int32_t);
      void* const memory = Runtime::Allocate(BYTES);
      if (memory == nullptr || !Runtime::Clear(memory, BYTES, stream)) return nullptr;
      place->counters = static_cast<int32_t*>(memory);
    }
    return place->counters;
  }

  /// Lend the scratch memory of a stream, of at least so many bytes, until GiveBack. Null if there is none, or if it is
  /// lent already.
  Place* Lend(Stream stream, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Place* const place = Find(stream);
    if (place == nullptr || place->is_lent) return nullptr;
    if (place->bytes < bytes && !Grow(place, bytes)) return nullptr;
    place->is_lent = true;
    return place;
  }
  void GiveBack(Place* place) {
    const std::lock_guard<std::mutex> lock(mutex_);
    place->is_lent = false;
  }

 private:
  Place* Find(Stream stream) {
    unsigned long long id = 0;  // handles are reused; an earlier stream with the same handle may still have work
    if (!Runtime::FindId(stream, &id)) return nullptr;
    const auto found = places_.find(id);
    if (found != places_.end()) return &found->second;
    return places_.size() < MAX_STREAMS ? &places_[id] : nullptr;
  }

  /// Give a place more memory. What it had before, less than this in all, stays allocated: launches may still use it.
  static bool Grow(Place* place, int64_t bytes) {
    int64_t size = MIN_BYTES;
    while (size < bytes) size *= 2;
    void* const memory = Runtime::Allocate(size);
    if (memory == nullptr) return false;
    place->scratch = memory, place->bytes = size;
    return true;
  }

  std::mutex mutex_;
  std::map<unsigned long long, Place> places_;
};

#ifndef FLASHINFER_CPU
struct CudaStreams {
  using Stream = flashinfer::Stream;
  static bool FindId(Stream stream, unsigned long long* id) { return cudaStreamGetId(stream, id) == cudaSuccess; }
  static void* Allocate(int64_t bytes) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // another stream may be captured meanwhile
    cudaThreadExchangeStreamCaptureMode(&mode);
    void* memory = nullptr;
    const Status status = cudaMalloc(&memory, bytes);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (status != cudaSuccess) cudaGetLastError();  // callers fall back to torch's memory
    return status == cudaSuccess ? memory : nullptr;
  }
  static bool Clear(void* memory, int64_t bytes, Stream stream) {
    return cudaMemsetAsync(memory, 0, bytes, stream) == cudaSuccess;
  }
};

/// Return the memory of a device; null while the stream is captured, because its graph may be replayed while the stream
/// is busy.
inline StreamMemory<CudaStreams>* MemoryOf(Stream stream, DLDevice device) {
  constexpr int MAX_DEVICES = 16;
  static auto* const all = new StreamMemory<CudaStreams>[MAX_DEVICES];
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (device.device_id >= MAX_DEVICES) return nullptr;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) return nullptr;
  return &all[device.device_id];
}

/// Return `count` counters that are 0 whenever a launch on `stream` begins (kernels reset them), or null.
inline int32_t* ArrivalsOf(Stream stream, DLDevice device, int64_t count) {
  auto* const memory = count <= StreamMemory<CudaStreams>::COUNTERS ? MemoryOf(stream, device) : nullptr;
  return memory != nullptr ? memory->Counters(stream) : nullptr;
}
#endif

/// Scratch memory of a call that enqueues launches on the current device: that of the caller's stream, or torch's, whose
/// allocation takes 1 us. Torch's serves many bytes, captured streams, and calls that enqueue on a stream while another
/// thread does, whose launches may come between those of this call.
class CallMemory {
 public:
  CallMemory() = default;
  CallMemory(const CallMemory&) = delete;
  CallMemory& operator=(const CallMemory&) = delete;
#ifndef FLASHINFER_CPU
  ~CallMemory() {
    if (place_ != nullptr) memory_->GiveBack(place_);
  }
#endif

  /// Return memory until this object is destroyed; `most` bytes are kept with the stream. To be called once.
  void* Take(DLDevice device, int64_t bytes, [[maybe_unused]] int64_t most = 4 << 20) {
#ifndef FLASHINFER_CPU
    const Stream stream = get_stream(device);
    memory_ = bytes <= most ? MemoryOf(stream, device) : nullptr;
    place_ = memory_ != nullptr ? memory_->Lend(stream, bytes) : nullptr;
    if (place_ != nullptr) return place_->scratch;
#endif
    owner_ = alloc_tensor({bytes}, dl_uint8, device);
    return owner_.data_ptr();
  }

 private:
#ifndef FLASHINFER_CPU
  StreamMemory<CudaStreams>* memory_ = nullptr;
  StreamMemory<CudaStreams>::Place* place_ = nullptr;
#endif
  Tensor owner_;
};

}  // namespace flashinfer
