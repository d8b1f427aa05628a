// SPDX-License-Identifier: Apache-2.0
// Launchers of the gated activations: argument checks, rows, dtype dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/activation.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/activation_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/activation.cuh>
#endif
// clang-format on

using flashinfer::ActAndMulParams;
using flashinfer::Activation;

namespace {

/// Return the stride between rows of a tensor of any rank. The leading dimensions must collapse into one.
int64_t RowStride(const char* op, const char* name, const TensorView& t) {
  int64_t stride = t.ndim() == 0 ? 1 : t.size(-1), rows = 1;
  for (int i = t.ndim() - 2; i >= 0; --i) {
    if (t.size(i) == 1) continue;
    if (rows == 1) stride = t.stride(i);
    if (t.stride(i) != rows * stride) {
      FLASHINFER_THROW(ArgumentError) << op << ": " << name << ".stride(" << i << ") must be " << rows * stride << " ("
                                      << name << " must be contiguous, or rows at one distance), got " << t.stride(i);
    }
    rows *= t.size(i);
  }
  return stride;
}

template <Activation ACT, typename T>
void Run(const char* op, const ActAndMulParams<T>& p, const TensorView& input) {
  DeviceGuard guard(input.device());
  CheckStatus(op, flashinfer::ActAndMul<ACT, T>(p, get_stream(input.device())));
}

template <Activation ACT>
void RunActAndMul(const char* op, const TensorView& out, const TensorView& input, bool enable_pdl) {
  Expect(op, "input", input).on_device().rank(1, 16).dtype({dl_float16, dl_bfloat16, dl_float32}).last_dim_contiguous();
  const int64_t width = input.size(-1), unit = 128 / input.dtype().bits;  // elements in 16 bytes
  if (width % unit != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": input.shape[-1] must be a multiple of " << unit << " (16 bytes of "
                                    << input.dtype() << "), got " << width;
  }
  const Expect expect_out(op, "out", out);
  expect_out.same_device(input, "input").same_dtype(input, "input").rank(input.ndim());
  for (int i = 0; i + 1 < input.ndim(); ++i) expect_out.dim(i, input.size(i), "that of input");
  expect_out.dim(input.ndim() - 1, width / 2, "half of input.shape[-1]").last_dim_contiguous().distinct();
  expect_out.apart_or_in_place(input, "input");
  if (out.numel() == 0) return;

  DispatchFloat(input.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    ActAndMulParams<T> p{};
    p.gate = input.data_ptr<T>();
    // Arithmetic on bytes, because the 16-bit types are incomplete types for the host compiler.
    p.up = reinterpret_cast<const T*>(input.data_ptr<char>() + width / 2 * (input.dtype().bits / 8));
    p.out = out.data_ptr<T>();
    p.columns = width / 2;
    p.rows = out.numel() / p.columns;
    p.gate_stride = p.up_stride = RowStride(op, "input", input);
    p.out_stride = RowStride(op, "out", out);
    p.enable_pdl = UsePdl(enable_pdl, input.device());
    Run<ACT, T>(op, p, input);
  });
}

}  // namespace

void silu_and_mul(TensorView out, TensorView input, bool enable_pdl) {
  RunActAndMul<Activation::kSilu>("silu_and_mul", out, input, enable_pdl);
}

void gelu_and_mul(TensorView out, TensorView input, bool enable_pdl) {
  RunActAndMul<Activation::kGelu>("gelu_and_mul", out, input, enable_pdl);
}

void gelu_tanh_and_mul(TensorView out, TensorView input, bool enable_pdl) {
  RunActAndMul<Activation::kGeluTanh>("gelu_tanh_and_mul", out, input, enable_pdl);
}

void swiglu(TensorView out, TensorView x, TensorView gate) {
  const char* op = "swiglu";
  Expect(op, "x", x).on_device().dtype({dl_float16, dl_bfloat16, dl_float32});
  for (auto [name, t] : {std::pair{"gate", &gate}, std::pair{"out", &out}}) {
    Expect(op, name, *t).same_device(x, "x").same_dtype(x, "x").same_shape(x, "x");
  }
  Expect(op, "out", out).distinct().apart_or_in_place(x, "x").apart_or_in_place(gate, "gate");
  if (x.numel() == 0) return;
  const bool flat = x.IsContiguous() && gate.IsContiguous() && out.IsContiguous();
  if (!flat) {
    for (auto [name, t] : {std::pair{"x", &x}, std::pair{"gate", &gate}, std::pair{"out", &out}}) {
      Expect(op, name, *t).last_dim_contiguous();
    }
  }
  DispatchFloat(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    ActAndMulParams<T> p{};
    p.gate = gate.data_ptr<T>();
    p.up = x.data_ptr<T>();
    p.out = out.data_ptr<T>();
    p.columns = flat ? x.numel() : x.size(-1);
    p.rows = x.numel() / p.columns;
    p.gate_stride = flat ? 0 : RowStride(op, "gate", gate);
    p.up_stride = flat ? 0 : RowStride(op, "x", x);
    p.out_stride = flat ? 0 : RowStride(op, "out", out);
    Run<Activation::kSigmoid, T>(op, p, x);
  });
}
