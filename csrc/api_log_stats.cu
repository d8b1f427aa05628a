// SPDX-License-Identifier: Apache-2.0
// Launcher of api_log_stats: argument checks, element type and stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/api_log_stats.h>
#if defined(__CUDACC__)
#include <flashinfer/api_log_stats.cuh>
#endif
// clang-format on

namespace {

template <typename T>
void Run(const char* op, const TensorView& x, int64_t id) {
  const flashinfer::ApiLogStatsParams<T> p{static_cast<const T*>(x.data_ptr()), x.numel(), id};
  DeviceGuard guard(x.device());
  CheckStatus(op, flashinfer::ApiLogStats<T>(p, get_stream(x.device())));
}

}  // namespace

void api_log_stats(TensorView x, int64_t id) {
  const char* op = "api_log_stats";
  Expect(op, "x", x)
      .on_device()
      .contiguous()
      .dtype({dl_float32, dl_float16, dl_bfloat16, dl_int32, dl_int64, dl_uint8});
  switch (encode_dlpack_dtype(x.dtype())) {
    case encode_dlpack_dtype(dl_float32):
      return Run<float>(op, x, id);
    case encode_dlpack_dtype(dl_float16):
      return Run<flashinfer::float16_t>(op, x, id);
    case encode_dlpack_dtype(dl_bfloat16):
      return Run<flashinfer::bfloat16_t>(op, x, id);
    case encode_dlpack_dtype(dl_int32):
      return Run<int32_t>(op, x, id);
    case encode_dlpack_dtype(dl_int64):
      return Run<int64_t>(op, x, id);
    default:
      return Run<uint8_t>(op, x, id);
  }
}
