// SPDX-License-Identifier: Apache-2.0
// The work planner by itself, for test_plan.py.
#include "tvm_ffi_utils.h"
// clang-format off
#include <tvm/ffi/container/array.h>

#include <chrono>
#include <flashinfer/attention/plan/planner.h>
// clang-format on

using namespace flashinfer::attention;
using Numbers = tvm::ffi::Array<int64_t>;

namespace {

const int32_t* Pointer(const Optional<TensorView>& t) { return t.has_value() ? (*t).data_ptr<int32_t>() : nullptr; }

PlanInput InputOf(const Optional<TensorView>& qo_indptr, const TensorView& kv_indptr,
                  const Optional<TensorView>& kv_lens, const Numbers& numbers) {
  int at = 0;
  auto next = [&] { return int32_t(numbers[at++]); };
  PlanInput in{};
  in.batch_size = int32_t(kv_indptr.numel() - 1);
  in.qo_indptr = Pointer(qo_indptr);
  in.kv_indptr = kv_indptr.data_ptr<int32_t>();
  in.kv_lens = Pointer(kv_lens);
  in.uniform_qo_len = next();
  in.max_kv_len = next();
  in.page_size = next();
  in.num_qo_heads = next();
  in.num_kv_heads = next();
  in.head_dim_vo = next();
  in.causal = next() != 0;
  in.window_left = next();
  in.fixed_split = next();
  in.disable_split = next() != 0;
  in.cuda_graph = next() != 0;
  in.max_rows = next();
  in.decode_tile = next();
  in.decode_blocks = next();
  in.takes_shares = next() != 0;
  for (int i = 0; i < 2; ++i) in.prefill_tiles[i] = next();
  for (int i = 0; i < 2; ++i) in.prefill_blocks[i] = next();
  in.takes_items = next() != 0;
  return in;
}

/// Return the result of plan(); the lists go to `buffer`, items through the `room` bytes that begin at `offset`.
Numbers Plan(Optional<TensorView> qo_indptr, TensorView kv_indptr, Optional<TensorView> kv_lens, Numbers numbers,
             TensorView buffer, int64_t offset, int64_t room) {
  static PlanOutput out;
  const PlanInput in = InputOf(qo_indptr, kv_indptr, kv_lens, numbers);
  Planner::Use(out, in, room > 0 ? buffer.data_ptr<char>() + offset : nullptr, room);
  Planner(in, out).Run();
  if (out.info.int_bytes > buffer.numel()) TVM_FFI_THROW(ValueError) << "buffer";
  Planner::Write(out, buffer.data_ptr<char>());
  int64_t info[PLAN_INFO_SIZE];
  out.info.ToArray(info);
  return Numbers(info, info + PLAN_INFO_SIZE);
}

/// Nanoseconds of the quickest of some plans.
int64_t Time(Optional<TensorView> qo_indptr, TensorView kv_indptr, Optional<TensorView> kv_lens, Numbers numbers,
             TensorView buffer) {
  static PlanOutput out;
  const PlanInput in = InputOf(qo_indptr, kv_indptr, kv_lens, numbers);
  int64_t best = INT64_MAX;
  for (int i = 0; i < 200; ++i) {
    const auto start = std::chrono::steady_clock::now();
    Planner(in, out).Run();
    Planner::Write(out, buffer.data_ptr<char>());
    const auto time = std::chrono::steady_clock::now() - start;
    best = std::min<int64_t>(best, std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
  }
  return best;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, Plan)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(time, Time)
