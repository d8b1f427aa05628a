// SPDX-License-Identifier: Apache-2.0
// Launcher of scale: argument checks and stream; the element type is fixed by scale_config.inc.
#include "tvm_ffi_utils.h"
#include "scale_config.inc"

namespace flashinfer {
template <typename T>
cudaError_t ScaleLauncher(const T* input, T* output, float factor, int64_t n, cudaStream_t stream);
}

void scale(TensorView input, TensorView output, double factor) {
  Expect("scale", "input", input).on_device().dtype({DL_DTYPE}).contiguous();
  Expect("scale", "output", output)
      .same_device(input, "input")
      .same_dtype(input, "input")
      .same_shape(input, "input")
      .contiguous();
  DeviceGuard guard(input.device());
  CheckStatus("scale", flashinfer::ScaleLauncher<DType>(input.data_ptr<DType>(), output.data_ptr<DType>(),
                                                        float(factor), input.numel(), get_stream(input.device())));
}
