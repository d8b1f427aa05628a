// SPDX-License-Identifier: Apache-2.0
// shift: y = x + amount, elementwise, in float32 with one rounding. Parameters and entry, shared by both backends.
// Defined in shift.cuh (CUDA) and shift_cpu.h (CPU).
#pragma once
#include "backend.h"

namespace flashinfer {

/// `output` may be `input`: each element is read before it is written.
template <typename T>
struct ShiftParams {
  const T* input;
  T* output;
  float amount;
  int64_t size;  ///< number of elements
};

template <typename T>
Status Shift(const ShiftParams<T>& params, Stream stream);

}  // namespace flashinfer
