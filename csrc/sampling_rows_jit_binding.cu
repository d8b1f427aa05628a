// SPDX-License-Identifier: Apache-2.0
// Exports of the sampling_rows module.
#include "sampling_rows.cu"

FLASHINFER_EXPORT(top_p_renorm_probs, top_p_renorm_probs)
FLASHINFER_EXPORT(top_k_renorm_probs, top_k_renorm_probs)
FLASHINFER_EXPORT(top_k_mask_logits, top_k_mask_logits)
