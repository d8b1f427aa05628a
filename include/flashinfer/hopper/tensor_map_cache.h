// SPDX-License-Identifier: Apache-2.0
// Tensor maps that a thread has encoded before. A map holds an address, sizes and strides, and nothing of the memory, so
// it never becomes stale: the same tensor has the same map even if its memory was freed and taken again.
#pragma once
#include <vector>

#include "tensor_map.h"

namespace flashinfer {
namespace hopper {

inline bool IsSameBox(const TensorBox& x, const TensorBox& y) {
  bool is_same = x.data == y.data && x.element_bytes == y.element_bytes && x.swizzle == y.swizzle;
  for (int i = 0; i < 3; ++i) is_same = is_same && x.size[i] == y.size[i] && x.box[i] == y.box[i];
  for (int i = 0; i < 2; ++i) is_same = is_same && x.stride_bytes[i] == y.stride_bytes[i];
  return is_same;
}

/// Return the map of `t`: a copy of what this thread encoded before, or a new one, which takes the place of another.
inline cudaError_t FindTensorMap(CUtensorMap* map, const TensorBox& t) {
  struct Entry {
    CUtensorMap map;
    TensorBox box;  // data is null: not in use
  };
  constexpr uint64_t ENTRIES = 512;  // both weights of the layers of a large model, and their activations
  static thread_local std::vector<Entry> entries(ENTRIES);
  uint64_t hash = reinterpret_cast<uintptr_t>(t.data) / 16;
  for (const uint64_t x : {t.size[0], t.size[1], t.stride_bytes[0], uint64_t(t.box[1])}) hash = hash * 31 + x;
  Entry& entry = entries[(hash * 0x9E3779B97F4A7C15u) >> 55];
  if (entry.box.data == nullptr || !IsSameBox(entry.box, t)) {
    const cudaError_t status = EncodeTensorMap(&entry.map, t);
    entry.box = t;
    if (status != cudaSuccess) {
      entry.box.data = nullptr;
      return status;
    }
  }
  *map = entry.map;
  return cudaSuccess;
}

}  // namespace hopper
}  // namespace flashinfer
