// SPDX-License-Identifier: Apache-2.0
// Exports of the gemm module.
#include "gemm.cu"

FLASHINFER_EXPORT(gemm, gemm)
