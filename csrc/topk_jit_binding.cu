// SPDX-License-Identifier: Apache-2.0
// Exports of the topk module.
#include "topk.cu"

FLASHINFER_EXPORT(top_k, top_k)
FLASHINFER_EXPORT(top_k_page_table_transform, top_k_page_table_transform)
FLASHINFER_EXPORT(top_k_ragged_transform, top_k_ragged_transform)
FLASHINFER_EXPORT(top_k_varlen, top_k_varlen)
