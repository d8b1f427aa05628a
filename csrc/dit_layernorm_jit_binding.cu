// SPDX-License-Identifier: Apache-2.0
// Exports of the dit_layernorm module.
#include "tvm_ffi_utils.h"

void dit_layernorm(TensorView norm_out, TensorView residual_out, TensorView input, Optional<TensorView> residual,
                   Optional<TensorView> gate, Optional<TensorView> gate_bias, Optional<TensorView> scale,
                   Optional<TensorView> scale_bias, Optional<TensorView> shift, Optional<TensorView> shift_bias,
                   Optional<TensorView> gamma, Optional<TensorView> beta, Optional<TensorView> input_scale,
                   int64_t modulation_stride, double eps);

FLASHINFER_EXPORT(dit_layernorm, dit_layernorm)
