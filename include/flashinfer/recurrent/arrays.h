// SPDX-License-Identifier: Apache-2.0
// Arguments of the Mamba-2 kernels as strided arrays: tokens, weights of any float type, and indices of 32 or 64 bits.
#pragma once
#include <cstdint>

#include "../backend.h"
#include "../host_device.h"

namespace flashinfer {
namespace recurrent {

/// Tokens of a layer. Sequence n begins at n * batch, or at its first token * token in a packed batch; rows (dim or dstate)
/// are contiguous. Strides are in elements.
template <typename T>
struct TokenArray {
  T* data;
  int64_t batch, token, head;
};

enum class WeightType : int { kFloat, kBfloat16, kHalf };

/// dt, dt_bias or D: one number for each row of a head, of a type of its own. Engines pass one number for each head, expanded
/// with stride 0. `data` is null if there is none.
struct WeightArray {
  const void* data;
  WeightType type;
  int64_t batch, token, head, row;
};

/// Indices (n,) or (n, columns). `data` is null if there are none.
struct IndexArray {
  const void* data;
  bool is_wide;  ///< 64 bits
  int columns;
  int64_t batch, column;

  FLASHINFER_HD int64_t At(int64_t n, int64_t c = 0) const {
    const int64_t at = n * batch + c * column;
    return is_wide ? static_cast<const int64_t*>(data)[at] : static_cast<const int32_t*>(data)[at];
  }
};

/// Storage of a state: (slots, heads, dim, dstate), dstate contiguous; integers and e4m3 with one scale for each row.
template <typename T>
struct StateArray {
  T* data;
  int64_t slot, head, row;
  float* scale;  ///< null for types without a scale; rows are contiguous
  int64_t scale_slot, scale_head;
};

}  // namespace recurrent
}  // namespace flashinfer
