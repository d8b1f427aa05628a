// SPDX-License-Identifier: Apache-2.0
// The Hopper prefill kernel on the emulated device: plans a batch with the planner of all backends, runs the kernel and
// the merge. Compiled for head dimensions HEAD_QK and HEAD_VO, with HAS_CAP or with hooks of a user (USER_HOOKS, or SM90_FORM), for
// ragged keys (KERNEL_ROWS), for pages (KERNEL_PAGES) or both, with a mask of each pair (KERNEL_MASKS) or without, for
// queries of type DTYPE_Q, keys of type DTYPE_KV and results of type DTYPE_O, with scales of each head (HEAD_SCALES).
// With MIXED, requests of few rows are in a decode list, and both lists run in one launch
// (attention/fused/kernel_sm90.cuh). With SHORT_FORM, the kernel has the form for short items.
#include <flashinfer/attention/plan/planner.h>
#include <flashinfer/attention/plan/single.h>
#include <flashinfer/ptx/math.cuh>

namespace flashinfer {

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return uint32_t((uint64_t(high) << 32 | low) >> (shift & 31));
}

using Query = DTYPE_Q;
using Key = DTYPE_KV;
using Result = DTYPE_O;
struct Params : AttentionParams<Query, Key, Result, int32_t> {
  static constexpr int HEAD_DIM_QK = HEAD_QK, HEAD_DIM_VO = HEAD_VO, HEAD_DIM_PE = 0;
  static constexpr PosEncodingMode POS_ENCODING = PosEncodingMode::kNone;
  uint8_t* maybe_custom_mask;
  int32_t* maybe_mask_indptr;
  float* sink;
#ifdef HEAD_SCALES
  float *maybe_scale_q, *maybe_scale_k, *maybe_scale_v;
#endif
  double sm_scale, logits_soft_cap;
};

}  // namespace flashinfer

#ifdef USER_HOOKS
#define FLASHINFER_VARIANT_CHANGES_QUERIES
#endif
#include <flashinfer/attention/variant_sm90.h>

namespace flashinfer {

#ifdef USER_HOOKS
/// Hooks of a user: a sink, queries that are doubled, every fifth key of odd heads hidden, outputs that are negated.
struct UserVariant : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  float sm_scale_log2;
  template <typename P>
  UserVariant(const P& params, uint32_t, uint8_t*) : sm_scale_log2(float(params.sm_scale) * math::log2e) {}
  REGISTER_QUERY_TRANSFORM(params, q, { return q * 2.f; })
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx,
                       { return qo_head_idx % 2 == 0 || kv_idx % 5 != 0; })
  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {
    m = params.sink[qo_head_idx] * math::log2e;
    d = 1.f;
  })
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, { return -output / d; })
};
template <bool use_custom_mask>
using Variant = UserVariant;
#elif defined(SM90_FORM)
/// The published form for SM90: softmax with the scale of the updater, and a scale of outputs.
struct UserVariant : AttentionVariantBase {
  float sm_scale_log2, scale_pv;
  template <typename MainloopParams, typename Coordinates>
  UserVariant(const MainloopParams& params, const Coordinates& block_coord) {
    auto [q_tile, qo_head, kv_head, qo_begin, kv_begin, qo_len, kv_len, request] = block_coord;
    sm_scale_log2 = float(params.additional_params.sm_scale) * math::log2e;
    scale_pv = qo_head / (params.additional_params.num_qo_heads / params.additional_params.num_kv_heads) == kv_head &&
                       params.additional_params.qo_indptr[request] == qo_begin
                   ? 1.f
                   : NAN;
  }
  template <int NUM_ROWS_PER_THREAD>
  auto GetAttentionUpdater() {
    return OnlineSoftmax<NUM_ROWS_PER_THREAD, true>(sm_scale_log2);
  }
};
template <bool use_custom_mask>
using Variant = attention::Sm90Variant<UserVariant>;
#else
template <bool use_custom_mask>
using Variant = DefaultAttention<use_custom_mask, false, HAS_CAP, false>;
#endif

}  // namespace flashinfer

#include <flashinfer/attention/common/merge.cuh>
#ifdef MIXED
#include <flashinfer/attention/fused/kernel_sm90.cuh>
#else
#include <flashinfer/attention/prefill_sm90/launch.cuh>
#endif

using namespace flashinfer;
using namespace flashinfer::attention;

#ifdef SHORT_FORM
constexpr int TILE = SHORT_PREFILL_TILE;
#else
constexpr int TILE = PrefillTileSm90(HEAD_QK, HEAD_VO);
#endif

/// One call; Python passes these numbers in this order (test_emulated_prefill.py).
struct Call {
  int64_t q, k, v, o, lse, qo_indptr, kv_indptr, kv_lens, kv_indices, mask, mask_indptr, sink, scale_q, scale_k,
      scale_v;
  int64_t batch, rows, keys, qo_heads, kv_heads, page_size;  // page_size 0: ragged
  int64_t q_stride_n, q_stride_h, k_stride_page, k_stride_n, k_stride_h, v_stride_page, v_stride_n, v_stride_h;
  int64_t mask_mode, window_left, split, blocks;
};

template <typename T>
T* Pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

Params ParamsOf(const Call& c, double sm_scale, double soft_cap) {
  Params p{};
  p.q = Pointer<Query>(c.q), p.k = Pointer<Key>(c.k), p.v = Pointer<Key>(c.v), p.o = Pointer<Result>(c.o);
  p.lse = Pointer<float>(c.lse);
  p.q_stride_n = c.q_stride_n, p.q_stride_h = c.q_stride_h;
  p.o_stride_n = c.qo_heads * HEAD_VO, p.o_stride_h = HEAD_VO;
  p.k_stride_page = c.k_stride_page, p.k_stride_n = c.k_stride_n, p.k_stride_h = c.k_stride_h;
  p.v_stride_page = c.v_stride_page, p.v_stride_n = c.v_stride_n, p.v_stride_h = c.v_stride_h;
  p.qo_indptr = Pointer<int32_t>(c.qo_indptr), p.kv_indptr = Pointer<int32_t>(c.kv_indptr);
  p.kv_lens = Pointer<int32_t>(c.kv_lens);
  p.kv_indices = Pointer<int32_t>(c.kv_indices);
  p.qo_len = int32_t(c.rows), p.kv_len = int32_t(c.keys);
  p.page_size = FastDivisor(uint32_t(std::max<int64_t>(c.page_size, 1)));
  p.kv_heads = FastDivisor(uint32_t(c.kv_heads));
  p.group = FastDivisor(uint32_t(c.qo_heads / c.kv_heads));
  p.num_qo_heads = int32_t(c.qo_heads), p.num_kv_heads = int32_t(c.kv_heads);
  p.window_left = int32_t(c.window_left), p.mask_mode = int32_t(c.mask_mode);
  p.out_scale = 1.f, p.lse_scale = 1.f;
  p.maybe_custom_mask = Pointer<uint8_t>(c.mask), p.maybe_mask_indptr = Pointer<int32_t>(c.mask_indptr);
  p.sink = Pointer<float>(c.sink);
#ifdef HEAD_SCALES
  p.maybe_scale_q = Pointer<float>(c.scale_q), p.maybe_scale_k = Pointer<float>(c.scale_k);
  p.maybe_scale_v = Pointer<float>(c.scale_v);
#endif
  p.sm_scale = sm_scale, p.logits_soft_cap = soft_cap;
  return p;
}

PlanInput InputOf(const Call& c) {
  PlanInput in{};
  in.batch_size = int32_t(c.batch);
  in.qo_indptr = Pointer<int32_t>(c.qo_indptr);
  in.kv_indptr = Pointer<int32_t>(c.kv_indptr);
  in.kv_lens = Pointer<int32_t>(c.kv_lens);
  in.page_size = c.page_size > 0 ? int32_t(c.page_size) : 1;
  in.num_qo_heads = int32_t(c.qo_heads), in.num_kv_heads = int32_t(c.kv_heads), in.head_dim_vo = HEAD_VO;
  in.causal = c.mask_mode == int64_t(MaskMode::kCausal);
  in.window_left = int32_t(c.window_left);
  in.fixed_split = int32_t(c.split);
  in.disable_split = c.split == 0;
#ifdef MIXED
  in.disable_split = false;
  in.decode_tile = DECODE_TILE;
  in.decode_blocks = in.fused_blocks = int32_t(mixed_sm90::Shape<Params>::TEAMS * c.blocks);
  in.takes_shares = true;
#endif
  in.takes_items = true;
  in.prefill_tiles[0] = TILE;
  in.prefill_blocks[0] = int32_t(c.blocks);
  return in;
}

template <bool PAGED, bool ALL_MASKED>
int64_t Run(const Params& p, WorkList work) {
  Status status = LaunchPrefillSm90<Params, TILE, PAGED, ALL_MASKED>(p, work, false, nullptr);
  if (status == cudaSuccess) {
    status = LaunchMerge<Params, TILE>(p, work, false, nullptr);
  }
  return int64_t(status);
}

#ifdef MIXED
constexpr int TEAMS = mixed_sm90::Shape<Params>::TEAMS;

/// The decode list of a plan, without memory for partial states.
WorkList DecodeListOf(std::vector<char>& plan, const PlanOutput& out) {
  const auto* header = reinterpret_cast<const PlanHeader*>(plan.data());
  WorkList decode{};
  decode.items = reinterpret_cast<const WorkItem*>(plan.data() + out.info.decode_items);
  decode.has_shares = true;
  decode.num_items = &header->decode_items;
  decode.merges = reinterpret_cast<const MergeItem*>(plan.data() + out.info.decode_merges);
  decode.num_merges = &header->decode_merges;
  decode.tickets = reinterpret_cast<int32_t*>(plan.data() + out.info.decode_tickets);
  decode.arrivals = decode.tickets + TICKETS;
  decode.blocks = int32_t(out.info.decode_blocks);
  return decode;
}

/// Run both lists in one launch. Returns -2 if counters are not what the next launch begins with.
int64_t RunLists(const Params& prefill_params, const WorkList& prefill, const Params& decode_params, WorkList decode,
                 const PlanOutput& out) {
  std::vector<float> partial(size_t(out.decode_slots) * DECODE_TILE * (HEAD_VO + 1), NAN);
  decode.partial_o = partial.data();
  decode.partial_lse = partial.data() + size_t(out.decode_slots) * DECODE_TILE * HEAD_VO;
  Status status = LaunchFused<Params, TILE>(prefill_params, prefill, decode_params, decode, false, nullptr);
  if (status == cudaSuccess) status = LaunchMerge<Params, TILE>(prefill_params, prefill, false, nullptr);
  const int32_t* const counters = decode.tickets;
  for (int i = 0; i < TICKETS + out.info.decode_merge_blocks; ++i) {
    if (counters[i] != 0) return -2;
  }
  return int64_t(status);
}

/// Run the lists of one plan. Returns -1 if the plan does not divide the device.
int64_t RunMixed(const Params& p, const WorkList& prefill, const WorkList& decode, const PlanOutput& out, int64_t sms) {
  const int fused = FusedBlocks<Params, TILE>();
  if (fused != TEAMS * sms || !Planner::FusesLists(TILE, decode.blocks, prefill.blocks, fused, true)) return -1;
  return RunLists(p, prefill, p, decode, out);
}
#endif

/// Run the call; returns the status of the launches, or minus the number of work items if `only_count`.
EMULATION_EXPORT int64_t run(const Call* call, int64_t only_count, double sm_scale, double soft_cap) {
  const Call& c = *call;
  emulation::device.multiprocessors = int(c.blocks);
  const PlanInput in = InputOf(c);
  PlanOutput out;
  Planner(in, out).Run();
  std::vector<char> plan(size_t(out.info.int_bytes));
  Planner::Write(out, plan.data());
  const auto* header = reinterpret_cast<const PlanHeader*>(plan.data());
  WorkList work{};
  work.items = reinterpret_cast<const WorkItem*>(plan.data() + out.info.prefill_items);
  work.num_items = &header->prefill_items;
  work.merges = reinterpret_cast<const MergeItem*>(plan.data() + out.info.prefill_merges);
  work.num_merges = &header->prefill_merges;
  work.tickets = reinterpret_cast<int32_t*>(plan.data() + out.info.decode_tickets) + 1;
  work.is_by_head = out.info.is_by_head;
  work.blocks = int32_t(out.info.prefill_blocks);
  work.merge_blocks = int32_t(out.info.prefill_merge_blocks);
  std::vector<float> partial(size_t(out.prefill_slots) * TILE * (HEAD_VO + 1), NAN);
  work.partial_o = partial.data();
  work.partial_lse = partial.data() + size_t(out.prefill_slots) * TILE * HEAD_VO;
  if (only_count != 0) return -int64_t(header->prefill_items) * c.kv_heads;

  const Params p = ParamsOf(c, sm_scale, soft_cap);
#ifdef MIXED
  return RunMixed(p, work, DecodeListOf(plan, out), out, c.blocks);
#endif
  constexpr bool ALL_MASKED = KERNEL_MASKS;
  if (c.page_size > 0) return Run<KERNEL_PAGES, ALL_MASKED>(p, work);
  return Run<!KERNEL_ROWS, ALL_MASKED>(p, work);
}

#ifdef MIXED
/// Run one request with dense keys next to requests that decode, planned for the whole device (POD). The first `reading`
/// blocks begin with the decode list. `by_head` is WorkList::is_by_head of the request.
EMULATION_EXPORT int64_t run_pod(const Call* prompt, const Call* call, int64_t reading, int64_t by_head,
                                 double sm_scale) {
  emulation::device.multiprocessors = int(call->blocks);
  PlanInput in = InputOf(*call);
  in.fused_blocks = 0;
  PlanOutput out;
  Planner(in, out).Run();
  std::vector<char> plan(size_t(out.info.int_bytes));
  Planner::Write(out, plan.data());
  WorkList decode = DecodeListOf(plan, out);
  decode.blocks = std::min(decode.blocks, int32_t(reading) * TEAMS);

  Params page = ParamsOf(*prompt, sm_scale, 0.);
  page.page_size = FastDivisor(uint32_t(prompt->keys));
  page.kv_indices = Pointer<int32_t>(call->kv_indptr);
  page.qo_indptr = page.kv_indptr = page.kv_lens = nullptr;
  const int64_t rows = prompt->rows * (prompt->qo_heads / prompt->kv_heads);
  WorkList prefill = PlanSingle(rows, prompt->kv_heads, prompt->keys, TILE, 0, 0);
  int32_t taken = 0;
  prefill.tickets = &taken;
  prefill.is_by_head = by_head != 0;
  const int64_t status = RunLists(page, prefill, ParamsOf(*call, sm_scale, 0.), decode, out);
  return status == 0 && taken != 0 ? -3 : status;
}
#endif
