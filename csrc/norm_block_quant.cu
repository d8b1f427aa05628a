// SPDX-License-Identifier: Apache-2.0
// Launcher of the residual RMSNorm with e4m3 blocks: argument checks, dtype dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/norm_block_quant.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/norm_block_quant_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/norm_block_quant.cuh>
#endif
// clang-format on

namespace {

constexpr const char* OP = "fused_add_rmsnorm_fp8_block_quant";
constexpr int64_t MAX_HIDDEN = 16384;

/// Check that rows begin at multiples of what the CUDA kernel loads and stores at once.
void CheckRows(const char* name, const TensorView& t, int64_t bytes) {
  const int64_t size = t.dtype().bits / 8;
  const bool is_aligned = reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes == 0 &&
                          (t.size(0) < 2 || t.ndim() < 2 || t.stride(0) * size % bytes == 0);
  if (!is_aligned) {
    FLASHINFER_THROW(ArgumentError) << OP << ": " << name << " must have rows aligned to " << bytes
                                    << " bytes, got a stride of " << t.stride(0);
  }
}

template <typename T>
void Run(const TensorView& out, const TensorView& scales, const TensorView& normed, const TensorView& input,
         const TensorView& residual, const TensorView& weight, double eps, bool enable_pdl) {
  const flashinfer::NormBlockQuantParams<T> p{static_cast<const T*>(input.data_ptr()),
                                              static_cast<T*>(residual.data_ptr()),
                                              static_cast<const T*>(weight.data_ptr()),
                                              static_cast<T*>(normed.data_ptr()),
                                              static_cast<uint8_t*>(out.data_ptr()),
                                              scales.data_ptr<float>(),
                                              input.size(0),
                                              input.size(1),
                                              input.stride(0),
                                              residual.stride(0),
                                              normed.stride(0),
                                              out.stride(0),
                                              scales.stride(0),
                                              float(eps),
                                              UsePdl(enable_pdl, input.device())};
  CheckStatus(OP, flashinfer::NormBlockQuant<T>(p, get_stream(input.device())));
}

}  // namespace

/// `scales` is (hidden / 128, at least rows).
void fused_add_rmsnorm_fp8_block_quant(TensorView out, TensorView scales, TensorView normed, TensorView input,
                                       TensorView residual, TensorView weight, double eps, bool enable_pdl) {
  Expect(OP, "input", input).on_device().dtype({dl_bfloat16, dl_float16}).rank(2).last_dim_contiguous();
  const int64_t rows = input.size(0), hidden = input.size(1), step = hidden > 8192 ? 512 : 256;
  if (hidden == 0 || hidden % step != 0 || hidden > MAX_HIDDEN) {
    FLASHINFER_THROW(ArgumentError) << OP << ": input.shape[1] must be a multiple of 256 up to 8192, or of 512 up to "
                                    << MAX_HIDDEN << ", got " << hidden;
  }
  for (auto [name, t] : {std::pair{"residual", &residual}, std::pair{"normed_out", &normed}}) {
    Expect(OP, name, *t).same_device(input, "input").same_dtype(input, "input").same_shape(input, "input");
    Expect(OP, name, *t).last_dim_contiguous().distinct();
  }
  Expect(OP, "weight", weight).same_device(input, "input").same_dtype(input, "input").rank(1).contiguous();
  Expect(OP, "weight", weight).dim(0, hidden, "input.shape[1]");
  Expect(OP, "out", out).same_device(input, "input").dtype({dl_float8_e4m3fn}).same_shape(input, "input");
  Expect(OP, "out", out).last_dim_contiguous().distinct();
  Expect(OP, "block_scale", scales).same_device(input, "input").dtype({dl_float32}).rank(2).last_dim_contiguous();
  Expect(OP, "block_scale", scales).dim(0, hidden / 128, "input.shape[1] / 128").distinct();
  if (scales.size(1) < rows) {
    FLASHINFER_THROW(ArgumentError) << OP << ": block_scale.shape[1] must be at least input.shape[0] = " << rows
                                    << ", got " << scales.size(1);
  }
  Expect(OP, "residual", residual).apart(input, "input").apart(weight, "weight");
  Expect(OP, "normed_out", normed)
      .apart_or_in_place(input, "input")
      .apart(residual, "residual")
      .apart(weight, "weight");
  CheckRows("input", input, 16), CheckRows("residual", residual, 16), CheckRows("normed_out", normed, 16);
  CheckRows("weight", weight, 16), CheckRows("out", out, 8);
  DeviceGuard guard(input.device());
  if (input.dtype().code == kDLBfloat) {
    return Run<flashinfer::bfloat16_t>(out, scales, normed, input, residual, weight, eps, enable_pdl);
  }
  Run<flashinfer::float16_t>(out, scales, normed, input, residual, weight, eps, enable_pdl);
}
