// SPDX-License-Identifier: Apache-2.0
// Launchers of the block-scaled formats: argument checks, dtype dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/mx_quantization.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/mx_quantization_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/mx_quantization.cuh>
#endif
// clang-format on

using flashinfer::MX_BLOCK;
using flashinfer::ScaleGrid;
using flashinfer::ScaleLayout;

void mxfp8_quantize(TensorView out, TensorView scales, TensorView input, int64_t layout, bool enable_pdl) {
  const char* op = "mxfp8_quantize";
  Expect(op, "input", input).on_device().dtype({dl_float16, dl_bfloat16, dl_float32}).rank(2).contiguous();
  if (input.size(1) % MX_BLOCK != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": input.shape[1] must be a multiple of " << MX_BLOCK
                                    << " (elements that share a scale), got " << input.size(1);
  }
  const ScaleGrid grid{input.size(0), input.size(1) / MX_BLOCK, ScaleLayout(layout)};
  Expect(op, "out", out)
      .same_device(input, "input")
      .dtype({dl_uint8, dl_float8_e4m3fn})
      .same_shape(input, "input")
      .contiguous();
  Expect(op, "scales", scales).same_device(input, "input").dtype({dl_uint8}).rank(1).contiguous().numel(grid.Size());
  DeviceGuard guard(input.device());
  DispatchFloat(input.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const flashinfer::Mxfp8QuantizeParams<T> p{input.data_ptr<T>(), out.data_ptr<uint8_t>(), scales.data_ptr<uint8_t>(),
                                               grid, enable_pdl};
    CheckStatus(op, flashinfer::Mxfp8Quantize<T>(p, get_stream(input.device())));
  });
}

void block_scale_interleave(TensorView out, TensorView unswizzled_sf) {
  const char* op = "block_scale_interleave";
  const TensorView& sf = unswizzled_sf;
  Expect(op, "unswizzled_sf", sf).on_device().dtype({dl_uint8, dl_bfloat16}).rank(2, 3).contiguous();
  const ScaleGrid grid{sf.size(-2), sf.size(-1), ScaleLayout::k128x4};
  const int64_t batch_size = sf.ndim() == 3 ? sf.size(0) : 1;
  Expect(op, "out", out).same_device(sf, "unswizzled_sf").same_dtype(sf, "unswizzled_sf").rank(1).contiguous();
  Expect(op, "out", out).numel(batch_size * grid.Size());
  DeviceGuard guard(sf.device());
  auto run = [&](auto tag) {
    using U = typename decltype(tag)::type;
    const flashinfer::InterleaveParams<U> p{sf.data_ptr<U>(), out.data_ptr<U>(), batch_size, grid};
    CheckStatus(op, flashinfer::BlockScaleInterleave<U>(p, get_stream(sf.device())));
  };
  if (sf.dtype().bits == 8) return run(TypeTag<uint8_t>{});
  run(TypeTag<uint16_t>{});
}

#ifdef FLASHINFER_CPU
void dequantize(TensorView out, TensorView input, TensorView scales, Optional<TensorView> global_scale,
                int64_t block_size, bool is_e2m1, bool is_scale_e4m3, int64_t layout, tvm::ffi::String op_name,
                tvm::ffi::String input_name, tvm::ffi::String scales_name) {
  const char* op = op_name.c_str();  // one launcher serves several ops, whose argument names differ
  Expect(op, input_name.c_str(), input).on_device().dtype({dl_uint8, dl_float8_e4m3fn}).rank(2).contiguous();
  const int64_t rows = input.size(0), cols = input.size(1) * (is_e2m1 ? 2 : 1);
  if (block_size < 1 || cols % block_size != 0 || (is_e2m1 && block_size % 2 != 0)) {
    FLASHINFER_THROW(ArgumentError) << op << ": rows of " << input_name << " must have a multiple of " << block_size
                                    << " elements (those that share a scale, an even number for two to a byte), got "
                                    << cols;
  }
  const ScaleGrid grid{rows, cols / block_size, ScaleLayout(layout)};
  Expect(op, scales_name.c_str(), scales)
      .on_device()
      .dtype({dl_uint8, dl_float8_e4m3fn})
      .contiguous()
      .numel(grid.Size());
  if (global_scale.has_value())
    Expect(op, "global_scale_tensor", global_scale.value()).on_device().dtype({dl_float32}).numel(1);
  Expect(op, "out", out).on_device().dtype({dl_float32}).contiguous().numel(rows * cols);
  const flashinfer::DequantizeParams p{input.data_ptr<uint8_t>(),
                                       scales.data_ptr<uint8_t>(),
                                       global_scale.has_value() ? global_scale.value().data_ptr<float>() : nullptr,
                                       out.data_ptr<float>(),
                                       rows,
                                       cols,
                                       block_size,
                                       is_e2m1 ? flashinfer::BlockFormat::kE2M1 : flashinfer::BlockFormat::kE4M3,
                                       is_scale_e4m3 ? flashinfer::ScaleFormat::kE4M3 : flashinfer::ScaleFormat::kE8M0,
                                       ScaleLayout(layout)};
  CheckStatus(op, flashinfer::Dequantize(p, nullptr));
}
#endif
