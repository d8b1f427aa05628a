// SPDX-License-Identifier: Apache-2.0
// Exports of the vllm_ar module.
#include "vllm_ar.cu"

FLASHINFER_EXPORT(vllm_all_reduce, vllm_all_reduce)
FLASHINFER_EXPORT(vllm_meta_size, vllm_meta_size)
