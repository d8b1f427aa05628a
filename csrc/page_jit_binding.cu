// SPDX-License-Identifier: Apache-2.0
// Exports of the page module.
#include "page.cu"

FLASHINFER_EXPORT(append_paged_kv_cache, append_paged_kv_cache)
FLASHINFER_EXPORT(append_paged_mla_kv_cache, append_paged_mla_kv_cache)
FLASHINFER_EXPORT(get_batch_indices_positions, get_batch_indices_positions)
