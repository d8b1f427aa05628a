// SPDX-License-Identifier: Apache-2.0
// Launchers of a batch_decode module: a few tokens of each request, keys in pages.
#include "attention_call_cache.h"

using namespace flashinfer;
using namespace flashinfer::attention;

namespace {

constexpr const char* OP = "batch_decode";

PlanInput InputOf(int64_t batch_size, int64_t q_len, int64_t num_qo_heads, int64_t num_kv_heads, int64_t page_size,
                  bool enable_cuda_graph, int64_t window_left) {
  PlanInput in{};
  in.batch_size = int32_t(batch_size);
  in.uniform_qo_len = int32_t(q_len);
  in.page_size = int32_t(page_size);
  in.num_qo_heads = int32_t(num_qo_heads);
  in.num_kv_heads = int32_t(num_kv_heads);
  in.causal = q_len > 1;
  in.window_left = int32_t(window_left);
  in.cuda_graph = enable_cuda_graph;
  in.max_rows = int32_t(batch_size * q_len);
  SetTiles<false>(in);
  return in;
}

/// Make the plan input without key counts, which the kernel derives from kv_indptr and last_page_len on the device.
PlanInput InputOf(const TensorView& indptr, int64_t batch_size, int64_t num_qo_heads, int64_t num_kv_heads,
                  int64_t page_size, bool enable_cuda_graph, int64_t window_left) {
  PlanInput in = InputOf(batch_size, 1, num_qo_heads, num_kv_heads, page_size, enable_cuda_graph, window_left);
  in.kv_indptr = HostArray(OP, "indptr", indptr, batch_size + 1);
  in.keeps_indptr = true;
  return in;
}

/// Make the plan input with key counts `kv_lens`. Without kv_lens, the kernel derives the counts on the device.
PlanInput InputOf(const TensorView& kv_indptr, const Optional<TensorView>& kv_lens, int64_t q_len, int64_t num_qo_heads,
                  int64_t num_kv_heads, int64_t page_size, bool enable_cuda_graph, int64_t window_left,
                  int64_t fixed_split_size, bool disable_split_kv) {
  const int64_t batch_size = kv_lens.has_value() ? (*kv_lens).numel() : kv_indptr.numel() - 1;
  PlanInput in = InputOf(batch_size, q_len, num_qo_heads, num_kv_heads, page_size, enable_cuda_graph, window_left);
  in.kv_indptr = HostArray(OP, "kv_indptr", kv_indptr, batch_size + 1);
  in.keeps_indptr = true;
  if (kv_lens.has_value()) in.kv_lens = HostArray(OP, "kv_lens", *kv_lens, batch_size);
  in.fixed_split = int32_t(fixed_split_size);
  in.disable_split = disable_split_kv;
  return in;
}

}  // namespace

Numbers batch_decode_plan(TensorView float_ws, TensorView int_ws, TensorView, TensorView indptr, int64_t batch_size,
                          int64_t num_qo_heads, int64_t num_kv_heads, int64_t page_size, bool enable_cuda_graph,
                          int64_t window_left, double, int64_t, int64_t, TensorView, TensorView) {
  DeviceGuard guard(int_ws.device());
  return MakePlan(OP,
                  InputOf(indptr, batch_size, num_qo_heads, num_kv_heads, page_size, enable_cuda_graph, window_left),
                  {float_ws, int_ws});
}

Numbers batch_decode_plan_with_lens(TensorView float_ws, TensorView int_ws, TensorView, TensorView kv_indptr,
                                    Optional<TensorView> kv_lens, int64_t q_len, int64_t num_qo_heads,
                                    int64_t num_kv_heads, int64_t page_size, bool enable_cuda_graph,
                                    int64_t window_left, int64_t fixed_split_size, bool disable_split_kv) {
  DeviceGuard guard(int_ws.device());
  return MakePlan(OP,
                  InputOf(kv_indptr, kv_lens, q_len, num_qo_heads, num_kv_heads, page_size, enable_cuda_graph,
                          window_left, fixed_split_size, disable_split_kv),
                  {float_ws, int_ws});
}

Numbers batch_decode_workspace_size(TensorView indptr, int64_t batch_size, int64_t num_qo_heads, int64_t num_kv_heads,
                                    int64_t page_size, bool enable_cuda_graph, int64_t window_left, double, int64_t,
                                    int64_t, TensorView, TensorView) {
  return WorkspaceSize(
      OP, InputOf(indptr, batch_size, num_qo_heads, num_kv_heads, page_size, enable_cuda_graph, window_left));
}

Numbers batch_decode_workspace_size_with_lens(TensorView kv_indptr, Optional<TensorView> kv_lens, int64_t q_len,
                                              int64_t num_qo_heads, int64_t num_kv_heads, int64_t page_size,
                                              bool enable_cuda_graph, int64_t window_left, int64_t fixed_split_size,
                                              bool disable_split_kv) {
  return WorkspaceSize(OP, InputOf(kv_indptr, kv_lens, q_len, num_qo_heads, num_kv_heads, page_size, enable_cuda_graph,
                                   window_left, fixed_split_size, disable_split_kv));
}

Numbers batch_decode_plan_uniform(TensorView float_ws, TensorView int_ws, TensorView, int64_t batch_size, int64_t q_len,
                                  int64_t pages_per_request, int64_t max_kv_len, int64_t num_qo_heads,
                                  int64_t num_kv_heads, int64_t page_size, bool causal) {
  DeviceGuard guard(int_ws.device());
  const UniformInput<false> in(batch_size, q_len, pages_per_request, max_kv_len, num_qo_heads, num_kv_heads, page_size,
                               causal);
  return MakePlan(OP, in.plan, {float_ws, int_ws});
}

Numbers batch_decode_uniform_workspace_size(int64_t batch_size, int64_t q_len, int64_t pages_per_request,
                                            int64_t max_kv_len, int64_t num_qo_heads, int64_t num_kv_heads,
                                            int64_t page_size, bool causal) {
  const UniformInput<false> in(batch_size, q_len, pages_per_request, max_kv_len, num_qo_heads, num_kv_heads, page_size,
                               causal);
  return WorkspaceSize(OP, in.plan);
}

static CheckedCall Check(Arguments& args) {
  args.ExpectCount(14);
  const TensorView float_ws = args.Next<TensorView>(), int_ws = args.Next<TensorView>();
  const PlanInfo info = ReadPlan(OP, args.Next<Numbers>());
  const TensorView q = args.Next<TensorView>(), k = args.Next<TensorView>(), v = args.Next<TensorView>();
  const TensorView kv_indptr = args.Next<TensorView>(), kv_indices = args.Next<TensorView>();
  const TensorView last_page_len = args.Next<TensorView>(), o = args.Next<TensorView>();
  const Optional<TensorView> lse = args.Next<Optional<TensorView>>();
  const int64_t layout = args.Next<int64_t>(), window_left = args.Next<int64_t>();
  const bool enable_pdl = args.Next<bool>();
  Params p{};
  Expect(OP, "q", q).rank(3);
  SetQueries(p, OP, q, o, lse);
  SetKeys(p, OP, q, o, k, v, layout, true);
  ExtrasReader reader(args, q, layout, true);
  ReadExtras(p, reader);
  const int64_t batch_size = kv_indptr.numel() - 1;
  p.kv_indptr = Indices(OP, "kv_indptr", kv_indptr, q, 1);
  p.kv_indices = Indices(OP, "kv_indices", kv_indices, q, 0);
  p.last_page_len = Indices(OP, "kv_last_page_len", last_page_len, q, batch_size);
  CheckPageIds(OP, p, batch_size, kv_indices.size(0), k.size(0));
  p.qo_len = batch_size > 0 ? int32_t(q.size(0) / batch_size) : 0;
  p.window_left = int32_t(window_left);
  p.mask_mode = int32_t(p.qo_len > 1 ? MaskMode::kCausal : MaskMode::kNone);
  if (p.qo_len * batch_size != q.size(0)) {
    FLASHINFER_THROW(ArgumentError) << OP << ": q.shape[0] must be a multiple of " << batch_size
                                    << " (the requests of kv_indptr), got " << q.size(0);
  }
  CheckedCall call = CallOf(OP, p, info, float_ws, int_ws, q);
  call.layout = int32_t(layout);
  call.is_paged = true;
  call.enable_pdl = enable_pdl;
  return call;
}

/// run(float_ws, int_ws, plan_info, q, k_cache, v_cache, kv_indptr, kv_indices, last_page_len, o, lse | None, layout,
/// window_left, enable_pdl, *extras)
void batch_decode_run(Arguments& args) { Launch<false, true>(OP, Check(args)); }

/// record_run(record, is_capturable, *arguments of run)
void batch_decode_record_run(Arguments& args) {
  const Recorder recorder(args);
  const CheckedCall call = Check(args);
  Launch<false, true>(OP, call);
  recorder.Keep(call);
}

static constexpr bool SAME_STRIDES = true;  // keys and values have the same strides

/// rerun(record, q, k_cache, v_cache | None, o, lse | None, sm_scale, enable_pdl)
void batch_decode_rerun(Arguments& args) { Launch<false, true>(OP, Repeat(OP, args, SAME_STRIDES)); }

/// replan(record, float_ws, int_ws, plan_info, kv_indptr, kv_indices, last_page_len, *arguments of a Repetition): rerun
/// with another plan and page table, which replace those of the record
void batch_decode_replan(Arguments& args) {
  args.ExpectLast(REPLANNED_ARGUMENTS + REPETITION_ARGUMENTS);
  const Replanned plan(OP, args);
  const Repetition given(args);
  Record record = ReadRecord(OP, plan.memory);
  const int64_t batch_size = plan.kv_indptr.numel() - 1;
  if (record.call.params.qo_len * batch_size != given.q.size(0)) {
    FLASHINFER_THROW(ArgumentError) << OP << ": q.shape[0] must be " << record.call.params.qo_len << " for each of "
                                    << batch_size << " requests, got " << given.q.size(0);
  }
  const CheckedCall call = plan.Call(OP, record, given, batch_size, SAME_STRIDES);
  Launch<false, true>(OP, call);
  WriteRecord(plan.memory.data_ptr(), call, record.is_capturable);
}
