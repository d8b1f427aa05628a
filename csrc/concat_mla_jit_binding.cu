// SPDX-License-Identifier: Apache-2.0
// Exports of the concat_mla module.
#include "tvm_ffi_utils.h"

void concat_mla_k(TensorView k, TensorView k_nope, TensorView k_rope);

FLASHINFER_EXPORT(concat_mla_k, concat_mla_k)
