// SPDX-License-Identifier: Apache-2.0
// Launchers of a batch_prefill module: any number of tokens of each request, keys in pages or in rows.
#include "attention_call_cache.h"
#include "attention_single.h"

using namespace flashinfer;
using namespace flashinfer::attention;

namespace {

constexpr const char* OP = "batch_prefill";

/// Make the plan input. Without kv_lens, the kernel derives key counts from last_page_len on the device.
/// `num_colocated_ctas` below 0: the decode and prefill lists of this plan do not share a launch.
PlanInput InputOf(const TensorView& qo_indptr, const TensorView& kv_indptr, const Optional<TensorView>& kv_lens,
                  int64_t total_num_rows, int64_t batch_size, int64_t num_qo_heads, int64_t num_kv_heads,
                  int64_t page_size, bool enable_cuda_graph, bool causal, int64_t window_left, int64_t fixed_split_size,
                  bool disable_split_kv, int64_t num_colocated_ctas) {
  PlanInput in{};
  in.batch_size = int32_t(batch_size);
  in.qo_indptr = HostArray(OP, "qo_indptr", qo_indptr, batch_size + 1);
  in.kv_indptr = HostArray(OP, "kv_indptr", kv_indptr, batch_size + 1);
  in.keeps_indptr = true;
  if (kv_lens.has_value()) in.kv_lens = HostArray(OP, "kv_lens", *kv_lens, batch_size);
  in.page_size = int32_t(page_size);
  in.num_qo_heads = int32_t(num_qo_heads);
  in.num_kv_heads = int32_t(num_kv_heads);
  in.causal = causal;
  in.window_left = int32_t(window_left);
  in.fixed_split = fixed_split_size > 0 ? int32_t(fixed_split_size * page_size) : 0;
  in.disable_split = disable_split_kv;
  in.cuda_graph = enable_cuda_graph;
  in.max_rows = int32_t(total_num_rows);
  SetTiles<true>(in);
  // Pages that are no multiple of 8 tokens are not read by TMA (SMALLEST_BOX of attention/prefill_sm90/boxes.h).
  constexpr int64_t SMALLEST_PAGE = 8;
  if (num_colocated_ctas < 0 || (HAS_PREFILL_SM90 && page_size % SMALLEST_PAGE != 0)) in.fused_blocks = 0;
  return in;
}

/// Arguments of both runs after q, k and v.
struct Rest {
  int64_t mask_mode, layout, window_left;
  bool enable_pdl;
};

Rest NextRest(Arguments& args) {
  Rest rest{};
  rest.mask_mode = args.Next<int64_t>();
  rest.layout = args.Next<int64_t>();
  rest.window_left = args.Next<int64_t>();
  rest.enable_pdl = args.Next<bool>();
  return rest;
}

/// Make the parameters that paged and ragged calls share: tensors and options.
Params ParamsOf(Arguments& args, const TensorView& q, const TensorView& k, const TensorView& v,
                const TensorView& qo_indptr, const TensorView& kv_indptr, const TensorView& o,
                const Optional<TensorView>& lse, const Rest& rest, bool is_paged) {
  Params p{};
  Expect(OP, "q", q).rank(3);
  SetQueries(p, OP, q, o, lse);
  SetKeys(p, OP, q, o, k, v, rest.layout, is_paged);
  p.qo_len = int32_t(q.size(0));
  p.qo_indptr = Indices(OP, "qo_indptr", qo_indptr, q, 1);
  p.kv_indptr = Indices(OP, "kv_indptr", kv_indptr, q, qo_indptr.size(0));
  p.window_left = int32_t(rest.window_left);
  ExtrasReader reader(args, q, rest.layout, is_paged);
  ReadExtras(p, reader);
  SetMaskMode(p, OP, rest.mask_mode);
  return p;
}

}  // namespace

Numbers batch_prefill_plan(TensorView float_ws, TensorView int_ws, TensorView, TensorView qo_indptr,
                           TensorView kv_indptr, Optional<TensorView> kv_lens, int64_t total_num_rows,
                           int64_t batch_size, int64_t num_qo_heads, int64_t num_kv_heads, int64_t page_size,
                           bool enable_cuda_graph, int64_t, int64_t, bool causal, int64_t window_left,
                           int64_t fixed_split_size, bool disable_split_kv, int64_t num_colocated_ctas, int64_t) {
  DeviceGuard guard(int_ws.device());
  return MakePlan(
      OP,
      InputOf(qo_indptr, kv_indptr, kv_lens, total_num_rows, batch_size, num_qo_heads, num_kv_heads, page_size,
              enable_cuda_graph, causal, window_left, fixed_split_size, disable_split_kv, num_colocated_ctas),
      {float_ws, int_ws});
}

Numbers batch_prefill_workspace_size(TensorView qo_indptr, TensorView kv_indptr, Optional<TensorView> kv_lens,
                                     int64_t total_num_rows, int64_t batch_size, int64_t num_qo_heads,
                                     int64_t num_kv_heads, int64_t page_size, bool enable_cuda_graph, int64_t, int64_t,
                                     bool causal, int64_t window_left, int64_t fixed_split_size, bool disable_split_kv,
                                     int64_t num_colocated_ctas, int64_t) {
  return WorkspaceSize(
      OP, InputOf(qo_indptr, kv_indptr, kv_lens, total_num_rows, batch_size, num_qo_heads, num_kv_heads, page_size,
                  enable_cuda_graph, causal, window_left, fixed_split_size, disable_split_kv, num_colocated_ctas));
}

Numbers batch_prefill_plan_uniform(TensorView float_ws, TensorView int_ws, TensorView, int64_t batch_size,
                                   int64_t q_len, int64_t pages_per_request, int64_t max_kv_len, int64_t num_qo_heads,
                                   int64_t num_kv_heads, int64_t page_size, bool causal) {
  DeviceGuard guard(int_ws.device());
  const UniformInput<true> in(batch_size, q_len, pages_per_request, max_kv_len, num_qo_heads, num_kv_heads, page_size,
                              causal);
  return MakePlan(OP, in.plan, {float_ws, int_ws});
}

Numbers batch_prefill_uniform_workspace_size(int64_t batch_size, int64_t q_len, int64_t pages_per_request,
                                             int64_t max_kv_len, int64_t num_qo_heads, int64_t num_kv_heads,
                                             int64_t page_size, bool causal) {
  const UniformInput<true> in(batch_size, q_len, pages_per_request, max_kv_len, num_qo_heads, num_kv_heads, page_size,
                              causal);
  return WorkspaceSize(OP, in.plan);
}

namespace {

CheckedCall Complete(CheckedCall call, const Rest& rest, bool is_paged) {
  call.layout = int32_t(rest.layout);
  call.is_paged = is_paged;
  call.all_masked = WantsAll(rest.mask_mode);
  call.enable_pdl = rest.enable_pdl;
  return call;
}

constexpr int PAGED_ARGUMENTS = 16;  // number of arguments before those of the variant

/// Validate the arguments of paged_run. `more`: number of arguments of another call that follow.
CheckedCall CheckPaged(Arguments& args, int more = 0) {
  args.ExpectCount(PAGED_ARGUMENTS + more);
  const TensorView float_ws = args.Next<TensorView>(), int_ws = args.Next<TensorView>();
  const PlanInfo info = ReadPlan(OP, args.Next<Numbers>());
  const TensorView q = args.Next<TensorView>(), k = args.Next<TensorView>(), v = args.Next<TensorView>();
  const TensorView qo_indptr = args.Next<TensorView>(), kv_indptr = args.Next<TensorView>();
  const TensorView kv_indices = args.Next<TensorView>(), last_page_len = args.Next<TensorView>();
  const TensorView o = args.Next<TensorView>();
  const Optional<TensorView> lse = args.Next<Optional<TensorView>>();
  const Rest rest = NextRest(args);
  Params p = ParamsOf(args, q, k, v, qo_indptr, kv_indptr, o, lse, rest, true);
  p.kv_indices = Indices(OP, "kv_indices", kv_indices, q, 0);
  p.last_page_len = Indices(OP, "kv_last_page_len", last_page_len, q, qo_indptr.size(0) - 1);
  CheckPageIds(OP, p, qo_indptr.size(0) - 1, kv_indices.size(0), k.size(0));
  CheckedCall call = CallOf(OP, p, info, float_ws, int_ws, q);
  call.requests = int32_t(qo_indptr.size(0) - 1);
  return Complete(call, rest, true);
}

CheckedCall CheckRagged(Arguments& args) {
  args.ExpectCount(14);
  const TensorView float_ws = args.Next<TensorView>(), int_ws = args.Next<TensorView>();
  const PlanInfo info = ReadPlan(OP, args.Next<Numbers>());
  const TensorView q = args.Next<TensorView>(), k = args.Next<TensorView>(), v = args.Next<TensorView>();
  const TensorView qo_indptr = args.Next<TensorView>(), kv_indptr = args.Next<TensorView>();
  const TensorView o = args.Next<TensorView>();
  const Optional<TensorView> lse = args.Next<Optional<TensorView>>();
  const Rest rest = NextRest(args);
  const Params p = ParamsOf(args, q, k, v, qo_indptr, kv_indptr, o, lse, rest, false);
  return Complete(CallOf(OP, p, info, float_ws, int_ws, q), rest, false);
}

LaunchSite SiteOf(const CheckedCall& call) {
  return {OP, UsePdl(call.enable_pdl, call.device), get_stream(call.device), call.device};
}

/// Prefill requests of a call that may share a launch with the decode list of another call.
struct Prompts {
  const Params& params;
  const WorkList& work;
  int64_t tile;                  ///< rows of a tile of `work`
  int64_t rows, requests, keys;  ///< query tokens and keys of all requests
};

/// Return the number of decode blocks that a fused launch on Hopper has beside the prompts; 0: two launches. It is
/// estimated from means over requests.
[[maybe_unused]] int64_t ReadingBlocks(const Prompts& prompts, const CheckedCall& decode, int64_t fused, int64_t sms) {
  constexpr int64_t ROWS = 128;  // costs are counted per tile of so many rows
  const Params& p = prompts.params;
  const int64_t rows = prompts.rows * p.group.divisor;
  if (fused == 0 || decode.keys == 0 || prompts.requests == 0 || rows < Planner::LEAST_FUSED_TILES * prompts.tile) {
    return 0;
  }
  int64_t keys = prompts.keys / prompts.requests, read = decode.keys;
  if (p.mask_mode == int32_t(MaskMode::kCausal)) keys -= std::min(keys, prompts.rows / prompts.requests / 2);
  if (p.window_left >= 0) keys = std::min<int64_t>(keys, p.window_left + 1);
  if (decode.params.window_left >= 0) {
    read = std::min(read, int64_t{decode.requests} * (decode.params.window_left + 1));
  }
  const int64_t decode_units = DivideUp(read, KV_UNIT) + decode.requests;
  const int64_t prefill_units = DivideUp(rows, ROWS) * (DivideUp(keys, KV_UNIT) + 1);
  return Planner::ReadingSms(decode_units, prefill_units, sms) * (fused / sms);
}

/// Try to launch a prefill list and the decode list of another call together. Returns false if the two lists have to be
/// launched one after the other. The decode call was planned for the whole device: the fewer decode blocks of the fused
/// launch each take several shares of the list.
bool TryLaunchFused(const LaunchSite& site, const Prompts& prompts, const CheckedCall& decode) {
  if constexpr (HAS_FUSED) {
    if (decode.all_masked || decode.prefill_list.blocks > 0) return false;
    CheckScale(OP, prompts.params);
    CheckScale(OP, decode.params);
    WorkList decode_list = decode.decode_list;
    int64_t blocks = FusedBlocks<Params, FUSED_TILE>();
    if constexpr (HAS_PREFILL_SM90) blocks = ReadingBlocks(prompts, decode, blocks, CachedBlocks<FUSED_TILE>());
    if (blocks == 0) return false;
    decode_list.blocks = std::min(decode_list.blocks, int32_t(blocks));
    return attention::TryLaunchFused(site, {prompts.params, prompts.work}, prompts.tile, {decode.params, decode_list});
  }
  return false;
}

/// Convert ragged keys to paged parameters with one page. With a page stride of 0, any page table is valid.
Params AsPage(const Params& rows, const CheckedCall& paged) {
  Params p = rows;
  p.page_size = FastDivisor(uint32_t(p.kv_len));
  p.kv_indices = paged.params.kv_indptr;
  return p;
}

}  // namespace

/// paged_run(float_ws, int_ws, plan_info, q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, last_page_len, o,
/// lse | None, mask_mode, layout, window_left, enable_pdl, *extras)
void batch_prefill_paged_run(Arguments& args) { Launch<true, true>(OP, CheckPaged(args)); }

/// ragged_run(float_ws, int_ws, plan_info, q, k, v, qo_indptr, kv_indptr, o, lse | None, mask_mode, layout,
/// window_left, enable_pdl, *extras)
void batch_prefill_ragged_run(Arguments& args) { Launch<true, false>(OP, CheckRagged(args)); }

/// record_paged_run(record, is_capturable, *arguments of paged_run)
void batch_prefill_record_paged_run(Arguments& args) {
  const Recorder recorder(args);
  const CheckedCall call = CheckPaged(args);
  Launch<true, true>(OP, call);
  recorder.Keep(call);
}

/// record_ragged_run(record, is_capturable, *arguments of ragged_run)
void batch_prefill_record_ragged_run(Arguments& args) {
  const Recorder recorder(args);
  const CheckedCall call = CheckRagged(args);
  Launch<true, false>(OP, call);
  recorder.Keep(call);
}

/// rerun(record, q, k, v | None, o, lse | None, sm_scale, enable_pdl)
void batch_prefill_rerun(Arguments& args) {
  const CheckedCall call = Repeat(OP, args, false);
  if (call.is_paged) {
    Launch<true, true>(OP, call);
  } else {
    Launch<true, false>(OP, call);
  }
}

/// replan(record, float_ws, int_ws, plan_info, kv_indptr, kv_indices, last_page_len, qo_indptr, *arguments of a
/// Repetition): rerun of a paged call with another plan and page table, which replace those of the record
void batch_prefill_replan(Arguments& args) {
  args.ExpectLast(REPLANNED_ARGUMENTS + 1 + REPETITION_ARGUMENTS);
  const Replanned plan(OP, args);
  const TensorView qo_indptr = args.Next<TensorView>();
  const Repetition given(args);
  Record record = ReadRecord(OP, plan.memory);
  record.call.params.qo_indptr = Indices(OP, "qo_indptr", qo_indptr, given.q, 1);
  const CheckedCall call = plan.Call(OP, record, given, qo_indptr.size(0) - 1, false);
  Launch<true, true>(OP, call);
  WriteRecord(plan.memory.data_ptr(), call, record.is_capturable);
}

/// paged_pair_run(*arguments of paged_run for requests that prefill, *arguments of paged_run for requests that decode).
/// One launch if that is faster, otherwise two.
void batch_prefill_paged_pair_run(Arguments& args) {
  const CheckedCall prefill = CheckPaged(args, PAGED_ARGUMENTS + NUM_EXTRAS), decode = CheckPaged(args);
  const DeviceGuard guard(prefill.device);
  const LaunchSite site = SiteOf(prefill);
  if (!prefill.all_masked && prefill.decode_list.blocks == 0 &&
      TryLaunchFused(site,
                     {prefill.params, prefill.prefill_list, prefill.tile, prefill.rows, prefill.requests, prefill.keys},
                     decode)) {
    LaunchMerges<true>(site, prefill.params, prefill.prefill_list, prefill.tile);
    return;
  }
  Launch<true, true>(OP, prefill);
  Launch<true, true>(OP, decode);
}

/// single_pair_run(*arguments of run of a single_prefill module, *arguments of paged_run for requests that decode). One
/// launch if that is faster, otherwise two.
void batch_prefill_single_pair_run(Arguments& args) {
  args.ExpectCount(SINGLE_ARGUMENTS + NUM_EXTRAS + PAGED_ARGUMENTS);
  const SingleCall prefill = NextSingle(OP, args);
  const CheckedCall decode = CheckPaged(args);
  const DeviceGuard guard(prefill.device);
  const LaunchSite site = SiteOf(decode);
  const Params& p = prefill.params;
  if (HAS_FUSED && !prefill.all_masked && p.qo_len > 0 && p.kv_len > 0) {
    // No split-KV: whenever one launch is faster, there are more tiles than blocks.
    WorkList prefill_list = PlanSingle(int64_t(p.qo_len) * p.group.divisor, p.num_kv_heads, p.kv_len, FUSED_TILE, 0, 0);
    if constexpr (HAS_PREFILL_SM90) SetTickets(site, prefill_list, CachedBlocks<FUSED_TILE>());
    const Params page = AsPage(p, decode);
    if (TryLaunchFused(site, {page, prefill_list, FUSED_TILE, p.qo_len, 1, p.kv_len}, decode)) return;
  }
  RunSingle(site, prefill);
  Launch<true, true>(OP, decode);
}
