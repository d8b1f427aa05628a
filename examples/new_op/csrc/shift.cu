// SPDX-License-Identifier: Apache-2.0
// Launcher of shift: argument checks, dtype dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/shift.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/shift_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/shift.cuh>
#endif
// clang-format on

void shift(TensorView out, TensorView input, double amount) {
  Expect("shift", "input", input).on_device().dtype({dl_float16, dl_bfloat16, dl_float32}).contiguous();
  Expect("shift", "out", out)
      .same_device(input, "input")
      .same_dtype(input, "input")
      .same_shape(input, "input")
      .contiguous();
  if (input.numel() == 0) return;
  DispatchFloat(input.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    flashinfer::ShiftParams<T> p{input.data_ptr<T>(), out.data_ptr<T>(), float(amount), input.numel()};
    DeviceGuard guard(input.device());
    CheckStatus("shift", flashinfer::Shift<T>(p, get_stream(input.device())));
  });
}
