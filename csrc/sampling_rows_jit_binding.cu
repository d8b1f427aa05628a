// SPDX-License-Identifier: Apache-2.0
// Exports of the sampling_rows module.
#include "tvm_ffi_utils.h"

void top_p_renorm_probs(TensorView out, TensorView probs, Optional<TensorView> top_ps, double top_p);
void top_k_renorm_probs(TensorView out, TensorView probs, Optional<TensorView> top_ks, int64_t top_k);
void top_k_mask_logits(TensorView out, TensorView logits, Optional<TensorView> top_ks, int64_t top_k);

FLASHINFER_EXPORT(top_p_renorm_probs, top_p_renorm_probs)
FLASHINFER_EXPORT(top_k_renorm_probs, top_k_renorm_probs)
FLASHINFER_EXPORT(top_k_mask_logits, top_k_mask_logits)
