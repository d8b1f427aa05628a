// SPDX-License-Identifier: Apache-2.0
// Exports of the activation module.
#include "activation.cu"

FLASHINFER_EXPORT(silu_and_mul, silu_and_mul)
FLASHINFER_EXPORT(gelu_and_mul, gelu_and_mul)
FLASHINFER_EXPORT(gelu_tanh_and_mul, gelu_tanh_and_mul)
FLASHINFER_EXPORT(swiglu, swiglu)
