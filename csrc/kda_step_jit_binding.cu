// SPDX-License-Identifier: Apache-2.0
// Exports of the module of Kimi delta attention token by token.
#include "kda_step.cu"

FLASHINFER_EXPORT(kda_step, kda_step)
FLASHINFER_EXPORT(kda_decode, kda_decode)
FLASHINFER_EXPORT(kda_convolution, kda_convolution)
FLASHINFER_EXPORT(kda_gated_norm, kda_gated_norm)
