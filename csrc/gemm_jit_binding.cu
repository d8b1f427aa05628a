// SPDX-License-Identifier: Apache-2.0
// Exports of the gemm module.
#include "tvm_ffi_utils.h"

void gemm(TensorView out, TensorView a, TensorView b, Optional<TensorView> a_scale, Optional<TensorView> b_scale,
          Optional<TensorView> bias, Optional<TensorView> groups, Optional<TensorView> weight_indices, int64_t grouping,
          int64_t scale_m, int64_t scale_n, int64_t scale_k, double alpha, double beta, bool enable_pdl);

FLASHINFER_EXPORT(gemm, gemm)
