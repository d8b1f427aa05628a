// SPDX-License-Identifier: Apache-2.0
// Exports of the qk_rmsnorm_rope module.
#include "tvm_ffi_utils.h"

void qk_rmsnorm_rope(TensorView q_out, TensorView k_out, TensorView v_out, TensorView qkv, TensorView q_weight,
                     TensorView k_weight, int64_t ppf, int64_t pph, int64_t ppw, int64_t num_frame_channels,
                     int64_t num_height_channels, int64_t num_width_channels, int64_t head_dim, double eps, double base,
                     bool interleave, double factor, double low, double high, double attention_factor, bool is_qk_norm,
                     double qk_scale, double v_scale);

FLASHINFER_EXPORT(qk_rmsnorm_rope, qk_rmsnorm_rope)
