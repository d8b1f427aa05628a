// SPDX-License-Identifier: Apache-2.0
// The launcher: the only C++ that sees tensors. Checks what the kernel relies on, finds the C++ type and the stream.
// TensorView, the checks and the dispatch come from tvm_ffi_utils.h, which the build puts in front of this file.
#include "flashinfer/scale.cuh"

void scale_launcher(TensorView input, TensorView output, float factor) {
  CHECK_INPUT(input);  // on a GPU and contiguous, else an error that names `input`
  CHECK_INPUT(output);
  TVM_FFI_ICHECK_EQ(input.dtype(), output.dtype());
  TVM_FFI_ICHECK_EQ(input.numel(), output.numel());

  // The caller's current stream: kernels of the caller before and after this one stay in order.
  const cudaStream_t stream = get_stream(input.device());
  // Runs the lambda with DType = float, half or bfloat16; any other dtype is an error. The lambda returns a bool.
  DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP32_FP16(input.dtype(), DType, [&] {
    const cudaError_t status = flashinfer::ScaleLauncher<DType>(input.data_ptr<DType>(), output.data_ptr<DType>(),
                                                                factor, input.numel(), stream);
    if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "scale: " << cudaGetErrorString(status);
    return true;
  });
}
