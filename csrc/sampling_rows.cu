// SPDX-License-Identifier: Apache-2.0
// Launchers of rows filtered by top-k and top-p: argument checks, dtype dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include "sampling_arguments.h"
#if defined(FLASHINFER_CPU)
#include <flashinfer/sampling_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/sampling/filter_rows_launch.cuh>
#endif
// clang-format on

using namespace flashinfer;
using namespace flashinfer::sampling;

void top_p_renorm_probs(TensorView out, TensorView probs, Optional<TensorView> top_ps, double top_p) {
  const char* op = "top_p_renorm_probs";
  CheckRows(op, "probs", probs, {dl_float32});
  Expect(op, "out", out).same_device(probs, "probs").dtype({dl_float32}).same_shape(probs, "probs").contiguous();
  RowParams<float> p = RowsOf<float>(out, probs);
  p.filter = TopP(Parameter<float>(op, "top_p", top_ps, float(top_p), dl_float32, probs));
  p.enable_pdl = UsePdl(true, probs.device());
  if (p.rows == 0) return;
  DeviceGuard guard(probs.device());
  CheckStatus(op, RenormRows<float>(p, get_stream(probs.device())));
}

void top_k_renorm_probs(TensorView out, TensorView probs, Optional<TensorView> top_ks, int64_t top_k) {
  const char* op = "top_k_renorm_probs";
  CheckRows(op, "probs", probs, {dl_float32, dl_float16, dl_bfloat16});
  Expect(op, "out", out).same_device(probs, "probs").same_dtype(probs, "probs").same_shape(probs, "probs").contiguous();
  const auto k = TopKParameter(op, top_ks, top_k, probs);
  DispatchFloat(probs.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    RowParams<T> p = RowsOf<T>(out, probs);
    p.filter = TopK(k, false);
    p.enable_pdl = UsePdl(true, probs.device());
    if (p.rows == 0) return;
    DeviceGuard guard(probs.device());
    CheckStatus(op, RenormRows<T>(p, get_stream(probs.device())));
  });
}

void top_k_mask_logits(TensorView out, TensorView logits, Optional<TensorView> top_ks, int64_t top_k) {
  const char* op = "top_k_mask_logits";
  CheckRows(op, "logits", logits, {dl_float32, dl_float16, dl_bfloat16});
  Expect(op, "out", out).same_device(logits, "logits").same_dtype(logits, "logits").same_shape(logits, "logits");
  Expect(op, "out", out).contiguous();
  const auto k = TopKParameter(op, top_ks, top_k, logits);
  DispatchFloat(logits.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    RowParams<T> p = RowsOf<T>(out, logits);
    p.filter = TopK(k, false);
    p.enable_pdl = UsePdl(true, logits.device());
    if (p.rows == 0) return;
    DeviceGuard guard(logits.device());
    CheckStatus(op, MaskRows<T>(p, get_stream(logits.device())));
  });
}
