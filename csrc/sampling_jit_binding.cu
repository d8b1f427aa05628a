// SPDX-License-Identifier: Apache-2.0
// Exports of the sampling module.
#include "sampling.cu"

FLASHINFER_EXPORT(softmax, softmax)
FLASHINFER_EXPORT(sample, sample)
FLASHINFER_EXPORT(chain_speculative_sampling, chain_speculative_sampling)
