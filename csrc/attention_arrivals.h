// SPDX-License-Identifier: Apache-2.0
// Counters of launches that have no plan to keep them in.
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
/// Memory of one device for counters, some for each stream. It stays to the end of the process, when the driver may be
/// gone before static objects are.
class StreamCounters {
 public:
  static constexpr int64_t ROOM = 512;  ///< counters of a stream
  static constexpr size_t MAX_STREAMS = 128;

  /// Those of `stream`, zeroed when it asks first; null if it cannot have any.
  int32_t* Of(Stream stream) {
    unsigned long long id = 0;  // a handle may be that of an earlier stream, whose work is not done
    if (cudaStreamGetId(stream, &id) != cudaSuccess) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = streams_.find(id);
    if (found != streams_.end()) return found->second;
    if (streams_.size() == MAX_STREAMS || !Allocate()) return nullptr;
    int32_t* const counters = memory_ + streams_.size() * ROOM;
    if (cudaMemsetAsync(counters, 0, ROOM * sizeof(int32_t), stream) != cudaSuccess) return nullptr;
    return streams_[id] = counters;
  }

 private:
  bool Allocate() {
    if (memory_ != nullptr) return true;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // another stream may be captured meanwhile
    cudaThreadExchangeStreamCaptureMode(&mode);
    const Status status = cudaMalloc(reinterpret_cast<void**>(&memory_), MAX_STREAMS * ROOM * sizeof(int32_t));
    cudaThreadExchangeStreamCaptureMode(&mode);
    return status == cudaSuccess;
  }

  std::mutex mutex_;
  std::map<unsigned long long, int32_t*> streams_;
  int32_t* memory_ = nullptr;
};

/// `count` numbers that are 0 whenever a launch on `stream` begins, given that kernels leave them so. Null if there are
/// none: for more than there is room for, and while the stream is captured, because its graph may run when it is busy.
inline int32_t* ArrivalsOf(Stream stream, DLDevice device, int64_t count) {
  constexpr int MAX_DEVICES = 16;
  static StreamCounters* const counters = new StreamCounters[MAX_DEVICES];
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (count > StreamCounters::ROOM || device.device_id >= MAX_DEVICES) return nullptr;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) return nullptr;
  return counters[device.device_id].Of(stream);
}
#endif

}  // namespace attention
}  // namespace flashinfer
