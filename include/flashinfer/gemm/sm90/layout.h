// SPDX-License-Identifier: Apache-2.0
// The layouts that the copy engine of SM90 reads and writes.
#pragma once
#include <cstdint>

namespace flashinfer {
namespace gemm {

constexpr int COPY_ALIGNMENT = 16;  // bytes

/// Return true if rows are contiguous and begin at multiples of 16 bytes. Strides are in elements; the stride of a
/// dimension of one element does not matter. A stride of 0, which repeats an element, is refused.
inline bool TakesBulkCopies(const void* data, int element_bytes, int rank, const int64_t* sizes,
                            const int64_t* strides) {
  if (strides[rank - 1] != 1 && sizes[rank - 1] != 1) return false;
  uint64_t offsets = reinterpret_cast<uintptr_t>(data);
  for (int i = 0; i + 1 < rank; ++i) {
    if (sizes[i] == 1) continue;
    if (strides[i] == 0) return false;
    offsets |= uint64_t(strides[i]) * element_bytes;
  }
  return offsets % COPY_ALIGNMENT == 0;
}

}  // namespace gemm
}  // namespace flashinfer
