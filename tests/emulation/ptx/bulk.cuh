// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/bulk.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline void StoreBulk(void* to, uint32_t from, uint32_t bytes) { emulation::StoreBulkLater(to, from, bytes); }

}  // namespace ptx
}  // namespace flashinfer
