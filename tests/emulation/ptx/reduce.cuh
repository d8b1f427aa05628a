// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/reduce.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline uint32_t ReduceMin(uint32_t x) { return __reduce_min_sync(~0u, x); }
inline uint32_t ReduceMax(uint32_t x) { return __reduce_max_sync(~0u, x); }
inline uint32_t ReduceAdd(uint32_t x) { return __reduce_add_sync(~0u, x); }

}  // namespace ptx
}  // namespace flashinfer
