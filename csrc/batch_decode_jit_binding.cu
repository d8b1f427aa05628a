// SPDX-License-Identifier: Apache-2.0
// Exports of a batch_decode module. One unit with the launcher: each pays for the TVM-FFI headers.
#include "batch_decode.cu"

FLASHINFER_EXPORT_PLAN(plan, batch_decode_plan)
FLASHINFER_EXPORT_PLAN(plan_with_lens, batch_decode_plan_with_lens)
/// workspace_size: takes the arguments of either plan function, without the buffers.
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_workspace_size(void*, const TVMFFIAny* args, int32_t count,
                                                           TVMFFIAny* result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  constexpr int PLAN_ARGUMENTS = 12;
  using flashinfer::attention::CallForNumbers;
  *reinterpret_cast<tvm::ffi::Any*>(result) =
      count == PLAN_ARGUMENTS ? CallForNumbers("workspace_size", batch_decode_workspace_size, args, count)
                              : CallForNumbers("workspace_size", batch_decode_workspace_size_with_lens, args, count);
  TVM_FFI_SAFE_CALL_END();
}
FLASHINFER_EXPORT_PLAN(plan_uniform, batch_decode_plan_uniform)
FLASHINFER_EXPORT_PLAN(uniform_workspace_size, batch_decode_uniform_workspace_size)
FLASHINFER_EXPORT_RUN(run, batch_decode_run)
FLASHINFER_EXPORT_RUN(record_run, batch_decode_record_run)
FLASHINFER_EXPORT_RUN(rerun, batch_decode_rerun)
FLASHINFER_EXPORT_RUN(replan, batch_decode_replan)
