// SPDX-License-Identifier: Apache-2.0
// Exports of the module of gated norms.
#include "gated_norm.cu"

FLASHINFER_EXPORT(gated_residual_norm, gated_residual_norm)
FLASHINFER_EXPORT(sigmoid_gate_norm, sigmoid_gate_norm)
