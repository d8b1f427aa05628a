// SPDX-License-Identifier: Apache-2.0
// Validation of the page table of a batch where its values are in host memory.
#pragma once
#include "tvm_ffi_utils.h"

namespace flashinfer {
namespace attention {

#ifdef FLASHINFER_CPU
/// Refuse pages outside of a cache of `num_pages` among those that hold keys. Only the CPU backend can read the values.
template <typename Params>
void CheckPageIds(const char* op, const Params& p, int64_t batch_size, int64_t num_ids, int64_t num_pages) {
  for (int64_t request = 0; request < batch_size; ++request) {
    const int64_t begin = p.kv_indptr[request], keys = int32_t(p.get_kv_len(uint32_t(request)));
    const int64_t end = begin + (keys + int64_t(p.page_size.divisor) - 1) / int64_t(p.page_size.divisor);
    if (keys <= 0) continue;
    if (begin < 0 || end > num_ids) {
      FLASHINFER_THROW(ArgumentError) << op << ": the pages of request " << request << " must be at 0 to "
                                      << num_ids - 1 << " of kv_indices, got " << begin << " to " << end - 1;
    }
    for (int64_t i = begin; i < end; ++i) {
      if (p.kv_indices[i] < 0 || p.kv_indices[i] >= num_pages) {
        FLASHINFER_THROW(ArgumentError) << op << ": kv_indices[" << i << "] must be 0 to " << num_pages - 1
                                        << " (the cache has " << num_pages << " pages), got " << p.kv_indices[i];
      }
    }
  }
}
#else
template <typename Params>
void CheckPageIds(const char*, const Params&, int64_t, int64_t, int64_t) {}
#endif

}  // namespace attention
}  // namespace flashinfer
