// SPDX-License-Identifier: Apache-2.0
// Exports of the sampling module.
#include "tvm_ffi_utils.h"

void softmax(TensorView out, TensorView logits, Optional<TensorView> temperatures, double temperature, bool enable_pdl);
void sample(TensorView out, Optional<TensorView> valid, TensorView input, Optional<TensorView> indices, bool is_logits,
            int64_t method, Optional<TensorView> top_ks, int64_t top_k, Optional<TensorView> top_ps, double top_p,
            Optional<TensorView> seeds, int64_t seed, Optional<TensorView> offsets, int64_t offset);
void chain_speculative_sampling(TensorView out, TensorView accepted, TensorView emitted, TensorView draft_probs,
                                TensorView draft_token_ids, TensorView target_probs, Optional<TensorView> seeds,
                                int64_t seed, Optional<TensorView> offsets, int64_t offset);

FLASHINFER_EXPORT(softmax, softmax)
FLASHINFER_EXPORT(sample, sample)
FLASHINFER_EXPORT(chain_speculative_sampling, chain_speculative_sampling)
