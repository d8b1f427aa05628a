// SPDX-License-Identifier: Apache-2.0
// Launcher of the fused LayerNorm of diffusion transformers: argument checks, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/dit_layernorm.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/dit_layernorm_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/dit_layernorm.cuh>
#endif
// clang-format on

namespace {

const float* FloatRow(const char* op, const char* name, const TensorView& input, const Optional<TensorView>& t,
                      int64_t n) {
  if (!t.has_value()) return nullptr;
  const TensorView view = t.value();
  Expect(op, name, view).same_device(input, "input").dtype({dl_float32}).contiguous().numel(n);
  return view.data_ptr<float>();
}

const flashinfer::bfloat16_t* Modulation(const char* op, const char* name, const TensorView& input,
                                         const Optional<TensorView>& t, int64_t stride) {
  if (!t.has_value()) return nullptr;
  const TensorView view = t.value();
  Expect(op, name, view).same_device(input, "input").dtype({dl_bfloat16}).rank(2, 3).last_dim_contiguous();
  Expect(op, name, view).numel(input.numel());
  const bool batches_follow = view.ndim() == 2 || view.size(0) == 1 || view.stride(0) == view.size(1) * stride;
  if ((view.stride(-2) != stride && view.size(-2) > 1) || !batches_follow) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must have row stride " << stride << " throughout, got "
                                    << view.stride(-2);
  }
  return view.data_ptr<flashinfer::bfloat16_t>();
}

}  // namespace

/// One launcher for the three public forms; a form leaves out what it does not have.
void dit_layernorm(TensorView norm_out, TensorView residual_out, TensorView input, Optional<TensorView> residual,
                   Optional<TensorView> gate, Optional<TensorView> gate_bias, Optional<TensorView> scale,
                   Optional<TensorView> scale_bias, Optional<TensorView> shift, Optional<TensorView> shift_bias,
                   Optional<TensorView> gamma, Optional<TensorView> beta, Optional<TensorView> input_scale,
                   int64_t modulation_stride, double eps) {
  const char* op = "fused_dit_layernorm";
  Expect(op, "input", input).on_device().rank(3).dtype({dl_bfloat16}).contiguous();
  Expect(op, "norm_out", norm_out)
      .same_device(input, "input")
      .same_dtype(input, "input")
      .same_shape(input, "input")
      .contiguous();
  Expect(op, "residual_out", residual_out)
      .same_device(input, "input")
      .same_dtype(input, "input")
      .same_shape(input, "input")
      .contiguous();
  flashinfer::DitLayerNormParams p{};
  p.hidden = input.size(2);
  p.num_rows = input.size(0) * input.size(1);
  p.modulation_stride = modulation_stride;
  p.eps = static_cast<float>(eps);
  p.input = input.data_ptr<flashinfer::bfloat16_t>();
  p.norm_out = norm_out.data_ptr<flashinfer::bfloat16_t>();
  p.residual_out = residual_out.data_ptr<flashinfer::bfloat16_t>();
  if (residual.has_value()) {
    const TensorView view = residual.value();
    Expect(op, "residual", view)
        .same_device(input, "input")
        .same_dtype(input, "input")
        .same_shape(input, "input")
        .contiguous();
    p.residual = view.data_ptr<flashinfer::bfloat16_t>();
  }
  p.gate = Modulation(op, "gate", input, gate, modulation_stride);
  p.scale = Modulation(op, "scale", input, scale, modulation_stride);
  p.shift = Modulation(op, "shift", input, shift, modulation_stride);
  p.gate_bias = FloatRow(op, "gate_bias", input, gate_bias, p.hidden);
  p.scale_bias = FloatRow(op, "scale_bias", input, scale_bias, p.hidden);
  p.shift_bias = FloatRow(op, "shift_bias", input, shift_bias, p.hidden);
  p.gamma = FloatRow(op, "gamma", input, gamma, p.hidden);
  p.beta = FloatRow(op, "beta", input, beta, p.hidden);
  p.input_scale = FloatRow(op, "input_global_scaling_factor", input, input_scale, 1);
  DeviceGuard guard(input.device());
  CheckStatus(op, flashinfer::DitLayerNorm(p, get_stream(input.device())));
}
