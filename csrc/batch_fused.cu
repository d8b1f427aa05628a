// SPDX-License-Identifier: Apache-2.0
// Launchers of a batch_fused module: keys that many queries share and keys of each request, in one launch
// (attention/fused/plan.h). All keys are in the pages of one cache.
#include "attention_call_cache.h"
// clang-format off
#include <flashinfer/attention/fused/plan.h>
// clang-format on

using namespace flashinfer;
using namespace flashinfer::attention;

namespace {

constexpr const char* OP = "batch_fused";

PlanInput InputOf(const TensorView& qo_indptr, const TensorView& kv_indptr, const TensorView& kv_lens,
                  int64_t batch_size, int64_t max_rows, int64_t num_qo_heads, int64_t num_kv_heads, int64_t page_size,
                  bool enable_cuda_graph, bool causal) {
  PlanInput in{};
  in.batch_size = int32_t(batch_size);
  in.qo_indptr = HostArray(OP, "qo_indptr", qo_indptr, batch_size + 1);
  in.kv_indptr = HostArray(OP, "kv_indptr", kv_indptr, batch_size + 1);
  in.kv_lens = HostArray(OP, "kv_lens", kv_lens, batch_size);
  in.page_size = int32_t(page_size);
  in.num_qo_heads = int32_t(num_qo_heads);
  in.num_kv_heads = int32_t(num_kv_heads);
  in.head_dim_vo = Params::HEAD_DIM_VO;
  in.causal = causal;
  in.window_left = -1;
  in.cuda_graph = enable_cuda_graph;
  in.max_rows = int32_t(max_rows);
  in.decode_tile = DECODE_TILE;
  in.prefill_tiles[0] = PREFILL_TILE;
  in.prefill_tiles[1] = LARGE_PREFILL_TILE;
  CheckInput(OP, in);
  return in;
}

/// Arguments of the shared level; its work list is the prefill list of the call.
struct SharedLevel {
  const int32_t *qo_indptr, *kv_indptr, *kv_indices, *last_page_len;
  const TokenPlace* places;
};

struct FusedCall {
  CheckedCall own;
  SharedLevel shared;
};

struct FusedRecord {
  Record own;  // first: Repeat reads it there
  SharedLevel shared;
};
static_assert(std::is_trivially_copyable_v<FusedRecord>, "kept as bytes");

FusedCall Check(Arguments& args) {
  args.ExpectCount(20);
  const TensorView float_ws = args.Next<TensorView>(), int_ws = args.Next<TensorView>();
  const Numbers numbers = args.Next<Numbers>();
  const TensorView q = args.Next<TensorView>(), k = args.Next<TensorView>(), v = args.Next<TensorView>();
  auto next_tables = [&](Params& p) {
    const TensorView qo_indptr = args.Next<TensorView>(), kv_indptr = args.Next<TensorView>();
    const TensorView kv_indices = args.Next<TensorView>(), last_page_len = args.Next<TensorView>();
    p.qo_indptr = Indices(OP, "qo_indptr", qo_indptr, q, 1);
    p.kv_indptr = Indices(OP, "kv_indptr", kv_indptr, q, qo_indptr.size(0));
    p.kv_indices = Indices(OP, "kv_indices", kv_indices, q, 0);
    p.last_page_len = Indices(OP, "kv_last_page_len", last_page_len, q, qo_indptr.size(0) - 1);
  };
  Params shared{}, p{};
  next_tables(shared);
  next_tables(p);
  const TensorView o = args.Next<TensorView>();
  const Optional<TensorView> lse = args.Next<Optional<TensorView>>();
  const int64_t mask_mode = args.Next<int64_t>(), layout = args.Next<int64_t>();
  p.window_left = int32_t(args.Next<int64_t>());
  const bool enable_pdl = args.Next<bool>();
  Expect(OP, "q", q).rank(3);
  SetQueries(p, OP, q, o, lse);
  SetKeys(p, OP, q, o, k, v, layout, true);
  ExtrasReader reader(args, q, layout, true);
  ReadExtras(p, reader);
  SetMaskMode(p, OP, mask_mode);

  if (numbers.size() != FUSED_INFO_SIZE) {
    FLASHINFER_THROW(ArgumentError) << OP << ": plan_info must have " << FUSED_INFO_SIZE
                                    << " numbers (what plan() returned), got " << numbers.size();
  }
  int64_t values[FUSED_INFO_SIZE];
  for (int i = 0; i < FUSED_INFO_SIZE; ++i) values[i] = numbers[i];
  const PlanInfo decode_info = PlanInfo::FromArray(values), prefill_info = PlanInfo::FromArray(values + PLAN_INFO_SIZE);
  const int64_t *at = values + 2 * PLAN_INFO_SIZE, prefill_ints = at[0], prefill_floats = at[1], place_ints = at[2];
  CheckSize(OP, "float_workspace_buffer", float_ws, prefill_floats + prefill_info.float_bytes);
  CheckSize(OP, "int_workspace_buffer", int_ws, place_ints + q.size(0) * int64_t(sizeof(TokenPlace)));
  FusedCall call{CallOf(OP, p, decode_info, float_ws, int_ws, q), {}};
  char* const ints = int_ws.data_ptr<char>();
  call.own.decode_list.arrivals = nullptr;  // the merge of both lists is a kernel of its own
  call.own.prefill_list = PrefillList(prefill_info, ints + prefill_ints, float_ws.data_ptr<char>() + prefill_floats);
  call.own.tile = prefill_info.tile;
  call.own.layout = int32_t(layout);
  call.own.is_paged = true;
  call.own.enable_pdl = enable_pdl;
  call.shared = {shared.qo_indptr, shared.kv_indptr, shared.kv_indices, shared.last_page_len,
                 reinterpret_cast<const TokenPlace*>(ints + place_ints)};
  return call;
}

void Launch(const FusedCall& call) {
  const CheckedCall& own = call.own;
  CheckScale(OP, own.params);
  const DeviceGuard guard(own.device);
  FusedLists<Params> pair{own.params, own.params, own.prefill_list, own.decode_list, call.shared.places, own.rows};
  Params& shared = pair.prefill_params;
  shared.qo_indptr = call.shared.qo_indptr;
  shared.kv_indptr = call.shared.kv_indptr;
  shared.kv_indices = call.shared.kv_indices;
  shared.last_page_len = call.shared.last_page_len;
  shared.mask_mode = int32_t(MaskMode::kNone);  // shared keys come before all queries
  CheckStatus(OP, DispatchTile<true>(own.tile, [&](auto rows) {
                constexpr int TILE = decltype(rows)::value == DECODE_TILE ? PREFILL_TILE : decltype(rows)::value;
                return LaunchFusedCascade<Params, TILE>(pair, UsePdl(own.enable_pdl, own.device),
                                                        get_stream(own.device));
              }));
}

}  // namespace

/// Plan both levels. Returns an empty list if the kernels or the workspaces do not allow fusion: the caller then plans
/// each level separately.
Numbers batch_fused_plan(TensorView float_ws, TensorView int_ws, TensorView, TensorView shared_qo_indptr,
                         TensorView shared_kv_indptr, TensorView shared_kv_lens, int64_t shared_batch_size,
                         TensorView qo_indptr, TensorView kv_indptr, TensorView kv_lens, int64_t batch_size,
                         int64_t max_rows, int64_t num_qo_heads, int64_t num_kv_heads, int64_t page_size,
                         bool enable_cuda_graph, bool causal) {
  DeviceGuard guard(int_ws.device());
  const int blocks = std::min(FusedBlocks<Params, PREFILL_TILE>(), FusedBlocks<Params, LARGE_PREFILL_TILE>());
  if (blocks == 0) return {};
  auto input = [&](const TensorView& qo, const TensorView& kv, const TensorView& lens, int64_t batch, bool is_causal) {
    return InputOf(qo, kv, lens, batch, max_rows, num_qo_heads, num_kv_heads, page_size, enable_cuda_graph, is_causal);
  };
  static thread_local FusedPlan plan;
  PlanFused(input(shared_qo_indptr, shared_kv_indptr, shared_kv_lens, shared_batch_size, false),
            input(qo_indptr, kv_indptr, kv_lens, batch_size, causal), blocks, plan);
  if (ByteSize(float_ws) < plan.float_bytes || ByteSize(int_ws) < plan.int_bytes) return {};
  PlanCopy(OP, int_ws).Send(plan.int_bytes, [&](char* at) { WriteFused(plan, at); });
  int64_t numbers[FUSED_INFO_SIZE];
  plan.decode.info.ToArray(numbers);
  plan.prefill.info.ToArray(numbers + PLAN_INFO_SIZE);
  const int64_t starts[] = {plan.prefill_ints, plan.prefill_floats, plan.place_ints};
  std::copy(starts, starts + 3, numbers + 2 * PLAN_INFO_SIZE);
  return Numbers(numbers, numbers + FUSED_INFO_SIZE);
}

/// run(float_ws, int_ws, plan_info, q, k_cache, v_cache, tables of the shared level: qo_indptr, kv_indptr, kv_indices,
/// last_page_len, the same tables of the other level, o, lse | None, mask_mode, layout, window_left, enable_pdl,
/// *extras)
void batch_fused_run(Arguments& args) { Launch(Check(args)); }

/// record_run(record, is_capturable, *arguments of run)
void batch_fused_record_run(Arguments& args) {
  const TensorView to = args.Next<TensorView>();
  const bool is_capturable = args.Next<bool>();
  void* const at = RecordAddress(OP, to, sizeof(FusedRecord));
  const FusedCall call = Check(args);
  Launch(call);
  const FusedRecord record{{sizeof(Record), call.own, is_capturable}, call.shared};
  std::memcpy(at, &record, sizeof(record));
}

/// rerun(record, q, k_cache, v_cache | None, o, lse | None, sm_scale, enable_pdl)
void batch_fused_rerun(Arguments& args) {
  Arguments whole = args;
  const void* const record = RecordAddress(OP, args.Next<TensorView>(), sizeof(FusedRecord));
  FusedCall call{Repeat(OP, whole, false), {}};
  std::memcpy(&call.shared, static_cast<const char*>(record) + offsetof(FusedRecord, shared), sizeof(SharedLevel));
  Launch(call);
}
