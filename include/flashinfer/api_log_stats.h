// SPDX-License-Identifier: Apache-2.0
// Statistics of a tensor for the API log, printed by the device: parameters and entry. Defined in api_log_stats.cuh.
// There is no CPU kernel: on the host torch reads the values, see flashinfer/_runtime/describe.py.
//   test  pytest tests/test_api_log_stats.py
#pragma once
#include "backend.h"

namespace flashinfer {

/// Contiguous tensor of `numel` elements. The kernel prints `id`, which identifies the line of the log.
template <typename T>
struct ApiLogStatsParams {
  const T* x;
  int64_t numel;
  int64_t id;
};

/// T is float, float16_t, bfloat16_t, int32_t, int64_t or uint8_t.
template <typename T>
Status ApiLogStats(const ApiLogStatsParams<T>& params, Stream stream);

}  // namespace flashinfer
