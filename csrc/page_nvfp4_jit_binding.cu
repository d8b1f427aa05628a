// SPDX-License-Identifier: Apache-2.0
// Exports of the page_nvfp4 module.
#include "page_nvfp4.cu"

FLASHINFER_EXPORT(nvfp4_quantize_append_paged_kv_cache, nvfp4_quantize_append_paged_kv_cache)
FLASHINFER_EXPORT(nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
                  nvfp4_quantize_append_paged_kv_cache_with_slot_mapping)
