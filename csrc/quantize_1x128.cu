// SPDX-License-Identifier: Apache-2.0
// Launcher of the 1 x 128 quantiser of activations: checks, dtype dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/quantize_1x128.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/quantize_1x128_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/quantize_1x128.cuh>
#endif
// clang-format on

/// `scales` is (columns / 128, rows); its rows may be padded, so that the copy engine can read them.
void quantize_1x128(TensorView codes, TensorView scales, TensorView input, bool enable_pdl) {
  const char* op = "quantize_1x128";
  Expect(op, "input", input).on_device().dtype({dl_bfloat16, dl_float16}).rank(2).last_dim_contiguous();
  const int64_t rows = input.size(0), columns = input.size(1);
  if (columns % 128 != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": input.shape[1] must be divisible by block size 128, got " << columns;
  }
  Expect(op, "codes", codes).same_device(input, "input").dtype({dl_float8_e4m3fn}).rank(2).last_dim_contiguous();
  Expect(op, "codes", codes).same_shape(input, "input").distinct();
  Expect(op, "scales", scales).same_device(input, "input").dtype({dl_float32}).rank(2).last_dim_contiguous();
  Expect(op, "scales", scales).dim(0, columns / 128, "input.shape[1] / 128").dim(1, rows, "input.shape[0]");
#ifndef FLASHINFER_CPU  // the CUDA kernel reads 16 bytes at once
  const bool is_aligned = reinterpret_cast<uintptr_t>(input.data_ptr()) % 16 == 0 &&
                          (rows < 2 || (input.stride(0) % 8 == 0 && codes.stride(0) % 8 == 0)) &&
                          reinterpret_cast<uintptr_t>(codes.data_ptr()) % 8 == 0;
  if (!is_aligned) {
    FLASHINFER_THROW(ArgumentError) << op << ": rows of input must be aligned to 16 bytes and rows of codes to 8, got "
                                    << "strides " << input.stride(0) << " and " << codes.stride(0);
  }
#endif
  DeviceGuard guard(input.device());
  const flashinfer::gemm::Quantize1x128Params p{input.data_ptr(),
                                                input.stride(0),
                                                static_cast<uint8_t*>(codes.data_ptr()),
                                                codes.stride(0),
                                                scales.data_ptr<float>(),
                                                scales.stride(0),
                                                rows,
                                                int(columns / 128),
                                                UsePdl(enable_pdl, input.device())};
  const auto stream = get_stream(input.device());
  if (input.dtype().code == kDLBfloat) {
    return CheckStatus(op, flashinfer::gemm::Quantize1x128<flashinfer::bfloat16_t>(p, stream));
  }
  CheckStatus(op, flashinfer::gemm::Quantize1x128<flashinfer::float16_t>(p, stream));
}
