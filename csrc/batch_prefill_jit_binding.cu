// SPDX-License-Identifier: Apache-2.0
// Exports of a batch_prefill module. One unit with the launcher: each pays for the TVM-FFI headers.
#include "batch_prefill.cu"

/// plan: serving engines call this export directly, with the arguments of the release that they were written for. The
/// argument list may end after window_left or after any argument that follows.
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_plan(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  // fixed_split_size, disable_split_kv, num_colocated_ctas, uniform_q_len
  constexpr int64_t DEFAULTS[] = {-1, 0, 0, 0};
  constexpr int ALL = 20, NEEDED = ALL - int(std::size(DEFAULTS));
  TVMFFIAny filled[ALL];
  if (count >= NEEDED && count < ALL) {
    std::copy(args, args + count, filled);
    for (; count < ALL; ++count) filled[count] = tvm::ffi::AnyView(DEFAULTS[count - NEEDED]).CopyToTVMFFIAny();
    args = filled;
  }
  *reinterpret_cast<tvm::ffi::Any*>(result) =
      flashinfer::attention::CallForNumbers("plan", batch_prefill_plan, args, count);
  TVM_FFI_SAFE_CALL_END();
}
FLASHINFER_EXPORT_PLAN(workspace_size, batch_prefill_workspace_size)
FLASHINFER_EXPORT_PLAN(plan_uniform, batch_prefill_plan_uniform)
FLASHINFER_EXPORT_PLAN(uniform_workspace_size, batch_prefill_uniform_workspace_size)
FLASHINFER_EXPORT_RUN(paged_run, batch_prefill_paged_run)
FLASHINFER_EXPORT_RUN(ragged_run, batch_prefill_ragged_run)
FLASHINFER_EXPORT_RUN(record_paged_run, batch_prefill_record_paged_run)
FLASHINFER_EXPORT_RUN(record_ragged_run, batch_prefill_record_ragged_run)
FLASHINFER_EXPORT_RUN(rerun, batch_prefill_rerun)
FLASHINFER_EXPORT_RUN(replan, batch_prefill_replan)
FLASHINFER_EXPORT_RUN(paged_pair_run, batch_prefill_paged_pair_run)
FLASHINFER_EXPORT_RUN(single_pair_run, batch_prefill_single_pair_run)
