// SPDX-License-Identifier: Apache-2.0
// Numbers of a WeightArray on the device, whatever their type.
#pragma once
#include "../vec_dtypes.cuh"
#include "arrays.h"

namespace flashinfer {
namespace recurrent {

__device__ __forceinline__ float WeightAt(const WeightArray& w, int64_t at) {
  switch (w.type) {
    case WeightType::kFloat:
      return static_cast<const float*>(w.data)[at];
    case WeightType::kBfloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(w.data)[at]);
    default:
      return __half2float(static_cast<const __half*>(w.data)[at]);
  }
}

}  // namespace recurrent
}  // namespace flashinfer
