// SPDX-License-Identifier: Apache-2.0
// Per-stream scratch and counters for calls without plan(). Reuse is safe because launches on one stream are ordered.
#pragma once
#include "tvm_ffi_utils.h"
// clang-format off
#ifndef FLASHINFER_CPU
#include <map>
#include <mutex>
#endif
// clang-format on

namespace flashinfer {
namespace attention {

#ifndef FLASHINFER_CPU
/// Memory of the streams of one device. It is never freed: at process exit the driver may be gone before static objects
/// are destroyed.
class StreamMemory {
 public:
  static constexpr int64_t COUNTERS = 512;       ///< counters per stream
  static constexpr int64_t MAX_BYTES = 4 << 20;  ///< scratch bytes per stream
  static constexpr size_t MAX_STREAMS = 16;

  /// Return COUNTERS numbers, initially 0; null if there are none.
  int32_t* Counters(Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Place* const place = Find(stream);
    if (place == nullptr) return nullptr;
    if (place->counters == nullptr) {
      void* const memory = Allocate(COUNTERS * sizeof(int32_t));
      if (memory == nullptr) return nullptr;
      if (cudaMemsetAsync(memory, 0, COUNTERS * sizeof(int32_t), stream) != cudaSuccess) return nullptr;
      place->counters = static_cast<int32_t*>(memory);
    }
    return place->counters;
  }

  /// Return scratch memory, or null if there are fewer bytes.
  void* Scratch(Stream stream, int64_t bytes) {
    if (bytes > MAX_BYTES) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    Place* const place = Find(stream);
    if (place == nullptr) return nullptr;
    if (place->bytes == 0 && (place->scratch = Allocate(bytes)) != nullptr) place->bytes = bytes;
    return place->bytes >= bytes ? place->scratch : nullptr;
  }

 private:
  struct Place {
    int32_t* counters = nullptr;
    void* scratch = nullptr;
    int64_t bytes = 0;
  };

  Place* Find(Stream stream) {
    unsigned long long id = 0;  // handles are reused; an earlier stream with the same handle may still have work
    if (cudaStreamGetId(stream, &id) != cudaSuccess) return nullptr;
    const auto found = places_.find(id);
    if (found != places_.end()) return &found->second;
    return places_.size() < MAX_STREAMS ? &places_[id] : nullptr;
  }

  static void* Allocate(int64_t bytes) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // another stream may be captured meanwhile
    cudaThreadExchangeStreamCaptureMode(&mode);
    void* memory = nullptr;
    const Status status = cudaMalloc(&memory, bytes);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (status != cudaSuccess) cudaGetLastError();  // callers fall back to torch's memory
    return status == cudaSuccess ? memory : nullptr;
  }

  std::mutex mutex_;
  std::map<unsigned long long, Place> places_;
};

/// Return the memory of a device; null while the stream is captured, because its graph may be replayed while the stream
/// is busy.
inline StreamMemory* MemoryOf(Stream stream, DLDevice device) {
  constexpr int MAX_DEVICES = 16;
  static StreamMemory* const all = new StreamMemory[MAX_DEVICES];
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (device.device_id >= MAX_DEVICES) return nullptr;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) return nullptr;
  return &all[device.device_id];
}

/// Return `count` counters that are 0 whenever a launch on `stream` begins (kernels reset them), or null.
inline int32_t* ArrivalsOf(Stream stream, DLDevice device, int64_t count) {
  StreamMemory* const memory = count <= StreamMemory::COUNTERS ? MemoryOf(stream, device) : nullptr;
  return memory != nullptr ? memory->Counters(stream) : nullptr;
}

/// Return memory that a launch on `stream` may write to, or null.
inline void* ScratchOf(Stream stream, DLDevice device, int64_t bytes) {
  StreamMemory* const memory = bytes <= StreamMemory::MAX_BYTES ? MemoryOf(stream, device) : nullptr;
  return memory != nullptr ? memory->Scratch(stream, bytes) : nullptr;
}
#endif

}  // namespace attention
}  // namespace flashinfer
