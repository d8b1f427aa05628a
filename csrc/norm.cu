// SPDX-License-Identifier: Apache-2.0
// Launchers of RMSNorm and LayerNorm: argument checks, dtype dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/norm.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/norm_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/layernorm.cuh>
#include <flashinfer/norm.cuh>
#endif
// clang-format on

using flashinfer::LayerNormParams;
using flashinfer::NormOut;
using flashinfer::RMSNormParams;
using flashinfer::RowStride;

namespace {

NormOut OutKind(const TensorView& out) {
  if (out.dtype().code == kDLFloat8_e4m3fn) return NormOut::kE4M3;
  return out.dtype().code == kDLFloat8_e5m2 ? NormOut::kE5M2 : NormOut::kSame;
}

RowStride StrideOf(const TensorView& t) {
  if (t.ndim() == 3) return {t.stride(0), t.stride(1)};
  return {t.stride(0), 0};
}

/// Options of the RMSNorm forms besides their tensors.
struct RMSNormOptions {
  double eps;
  double weight_bias;
  bool silu;
  bool enable_pdl;
};

/// Run any RMSNorm form. `residual` and `scale` are null if the form has none.
void RunRMSNorm(const char* op, const TensorView& out, const TensorView& input, const TensorView* residual,
                const TensorView& weight, const TensorView* scale, const RMSNormOptions& options) {
  Expect(op, "input", input).on_device().rank(2, 3).dtype({dl_float16, dl_bfloat16, dl_float32}).last_dim_contiguous();
  const int64_t hidden = input.size(-1);
  Expect(op, "weight", weight)
      .same_device(input, "input")
      .same_dtype(input, "input")
      .rank(1)
      .contiguous()
      .dim(0, hidden, "the last dimension of input");
  const char* out_name = &out == &input ? "input" : "out";  // in place
  Expect(op, out_name, out).same_device(input, "input").same_shape(input, "input").last_dim_contiguous().distinct();
  if (&out != &input) Expect(op, "out", out).apart_or_in_place(input, "input");
  Expect(op, out_name, out).apart(weight, "weight");
  if (residual != nullptr) {
    Expect(op, "residual", *residual)
        .same_device(input, "input")
        .same_dtype(input, "input")
        .same_shape(input, "input")
        .last_dim_contiguous()
        .distinct()
        .apart(input, "input")
        .apart(out, out_name)
        .apart(weight, "weight");
  }
  if (scale != nullptr) {
    Expect(op, "out", out).dtype({dl_float8_e4m3fn, dl_float8_e5m2});
    Expect(op, "scale", *scale).same_device(input, "input").dtype({dl_float32}).numel(1);
  } else if (!options.silu) {
    Expect(op, "out", out).same_dtype(input, "input");
  }
  DeviceGuard guard(input.device());
  DispatchFloat(input.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    RMSNormParams<T> p{};
    p.input = input.data_ptr<T>();
    p.weight = weight.data_ptr<T>();
    p.out = out.data_ptr();
    p.heads = input.ndim() == 3 ? input.size(1) : 1;
    p.num_rows = input.size(0) * p.heads;
    p.hidden = hidden;
    p.input_stride = StrideOf(input);
    p.out_stride = StrideOf(out);
    if (residual != nullptr) {
      p.residual = residual->data_ptr<T>();
      p.residual_stride = StrideOf(*residual);
    }
    if (scale != nullptr) p.scale = scale->data_ptr<float>();
    p.eps = static_cast<float>(options.eps);
    p.weight_bias = static_cast<float>(options.weight_bias);
    p.out_kind = OutKind(out);
    p.silu = options.silu;
    p.enable_pdl = UsePdl(options.enable_pdl, input.device());
    CheckStatus(op, flashinfer::RMSNorm<T>(p, get_stream(input.device())));
  });
}

void RunLayerNorm(const char* op, const TensorView& out, const TensorView& input, const TensorView& gamma,
                  const TensorView& beta, const TensorView* scale, double eps) {
  Expect(op, "input", input).on_device().rank(2).dtype({dl_bfloat16}).contiguous();
  const int64_t hidden = input.size(1);
  for (auto [name, t] : {std::pair{"gemma", &gamma}, std::pair{"beta", &beta}}) {
    Expect(op, name, *t)
        .same_device(input, "input")
        .dtype({dl_float32})
        .rank(1)
        .dim(0, hidden, "input.shape[1]")
        .contiguous();
  }
  Expect(op, "out", out).same_device(input, "input").same_shape(input, "input").last_dim_contiguous().distinct();
  Expect(op, "out", out).apart_or_in_place(input, "input").apart(gamma, "gemma").apart(beta, "beta");
  if (scale != nullptr) {
    Expect(op, "out", out).dtype({dl_float8_e4m3fn, dl_float8_e5m2});
    Expect(op, "scale", *scale).same_device(input, "input").dtype({dl_float32}).numel(1);
  } else {
    Expect(op, "out", out).same_dtype(input, "input");
  }
  DeviceGuard guard(input.device());
  LayerNormParams p{};
  p.input = input.data_ptr<flashinfer::bfloat16_t>();
  p.gamma = gamma.data_ptr<float>();
  p.beta = beta.data_ptr<float>();
  p.out = out.data_ptr();
  p.scale = scale != nullptr ? scale->data_ptr<float>() : nullptr;
  p.num_rows = input.size(0);
  p.hidden = hidden;
  p.input_stride = input.stride(0);
  p.out_stride = out.stride(0);
  p.eps = static_cast<float>(eps);
  p.out_kind = OutKind(out);
  CheckStatus(op, flashinfer::LayerNorm(p, get_stream(input.device())));
}

}  // namespace

void rmsnorm(TensorView out, TensorView input, TensorView weight, double eps, double weight_bias, bool enable_pdl) {
  const char* op = weight_bias == 0 ? "rmsnorm" : "gemma_rmsnorm";
  RunRMSNorm(op, out, input, nullptr, weight, nullptr, {eps, weight_bias, false, enable_pdl});
}

void fused_add_rmsnorm(TensorView input, TensorView residual, TensorView weight, double eps, double weight_bias,
                       bool enable_pdl) {
  const char* op = weight_bias == 0 ? "fused_add_rmsnorm" : "gemma_fused_add_rmsnorm";
  RunRMSNorm(op, input, input, &residual, weight, nullptr, {eps, weight_bias, false, enable_pdl});
}

void rmsnorm_quant(TensorView out, TensorView input, TensorView weight, TensorView scale, double eps, bool enable_pdl) {
  RunRMSNorm("rmsnorm_quant", out, input, nullptr, weight, &scale, {eps, 0, false, enable_pdl});
}

void fused_add_rmsnorm_quant(TensorView out, TensorView input, TensorView residual, TensorView weight, TensorView scale,
                             double eps, bool enable_pdl) {
  RunRMSNorm("fused_add_rmsnorm_quant", out, input, &residual, weight, &scale, {eps, 0, false, enable_pdl});
}

void rmsnorm_silu(TensorView out, TensorView input, TensorView weight, double eps) {
  const char* op = "fused_rmsnorm_silu";
  Expect(op, "input", input).rank(2).dtype({dl_bfloat16});
  Expect(op, "out", out).dtype({dl_bfloat16, dl_float8_e4m3fn});
  RunRMSNorm(op, out, input, nullptr, weight, nullptr, {eps, 0, true, false});
}

void layernorm(TensorView out, TensorView input, TensorView gamma, TensorView beta, double eps) {
  RunLayerNorm("layernorm", out, input, gamma, beta, nullptr, eps);
}

void layernorm_quant(TensorView out, TensorView input, TensorView gamma, TensorView beta, TensorView scale,
                     double eps) {
  RunLayerNorm("layernorm_quant", out, input, gamma, beta, &scale, eps);
}
