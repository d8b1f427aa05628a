// SPDX-License-Identifier: Apache-2.0
// run() of attention modules: turns tensors into Params and a plan into work lists, and launches the lists.
#pragma once
#include <flashinfer/attention/plan/single.h>

#include "attention_plan.h"
#include "stream_memory.h"

namespace flashinfer {
namespace attention {

// ------------------------------------------------------------------------------------------------ tensors

template <typename T>
constexpr DLDataType DL_TYPE = dl_uint8;
template <>
inline constexpr DLDataType DL_TYPE<float> = dl_float32;
template <>
inline constexpr DLDataType DL_TYPE<float16_t> = dl_float16;
template <>
inline constexpr DLDataType DL_TYPE<bfloat16_t> = dl_bfloat16;
template <>
inline constexpr DLDataType DL_TYPE<float8_e4m3_t> = dl_float8_e4m3fn;
template <>
inline constexpr DLDataType DL_TYPE<float8_e5m2_t> = dl_float8_e5m2;

constexpr bool IS_NVFP4 = std::is_same_v<Params::DTypeKV, uint8_t>;

/// Columns of a tensor that stores `head_dim` numbers per head: two numbers share a byte of an NVFP4 cache.
constexpr int64_t Stored(int64_t head_dim) { return IS_NVFP4 ? head_dim / 2 : head_dim; }

/// Stride of dimension `i`; 0 for a dimension of one element, whose stride is never used and may be anything.
inline int64_t StrideOf(const TensorView& t, int i) { return t.size(i) == 1 ? 0 : t.stride(i); }

/// Refuse a cache that kernels cannot address: they count units of 16 bytes in 32 bits (RowOffset of
/// attention/common/kv_rows.cuh). The CPU and NVFP4 kernels use 64 bits.
inline void CheckReach([[maybe_unused]] const char* op, [[maybe_unused]] const char* name,
                       [[maybe_unused]] const TensorView& t) {
#ifndef FLASHINFER_CPU
  constexpr int64_t REACH = int64_t{16} << 32;
  int64_t last = 0;
  for (int i = 0; i < t.ndim() - 1; ++i) last += (t.size(i) - 1) * StrideOf(t, i);
  const int64_t bytes = last * t.dtype().bits / 8;
  if (!IS_NVFP4 && bytes >= REACH) {
    FLASHINFER_THROW(ArgumentError) << op << ": the last row of " << name << " must be less than " << REACH
                                    << " bytes behind the first (what kernels can address), got " << bytes;
  }
#endif
}

/// q and o are [tokens, heads, head_dim], or [heads, head_dim] for one token; lse has one number for each head of them.
inline void SetQueries(Params& p, const char* op, const TensorView& q, const TensorView& o,
                       const Optional<TensorView>& lse) {
  const int heads = q.ndim() - 2;
  Expect(op, "q", q).on_device().dtype({DL_TYPE<Params::DTypeQ>}).last_dim_contiguous();
  Expect(op, "q", q).dim(-1, Params::HEAD_DIM_QK - Params::HEAD_DIM_PE, "head_dim_qk of the module");
  Expect(op, "out", o).same_device(q, "q").dtype({DL_TYPE<Params::DTypeO>}).rank(q.ndim()).last_dim_contiguous();
  Expect(op, "out", o).dim(-1, Params::HEAD_DIM_VO, "head_dim_vo of the module").dim(0, q.size(0), "q.shape[0]");
  Expect(op, "out", o).dim(heads, q.size(heads), "heads of q").distinct().apart(q, "q");
  p.q = q.data_ptr<Params::DTypeQ>();
  p.o = o.data_ptr<Params::DTypeO>();
  p.q_stride_n = heads == 0 ? 0 : StrideOf(q, 0);
  p.o_stride_n = heads == 0 ? 0 : StrideOf(o, 0);
  p.q_stride_h = StrideOf(q, heads);
  p.o_stride_h = StrideOf(o, heads);
  p.num_qo_heads = int32_t(q.size(heads));
  if (lse.has_value()) {
    Expect(op, "lse", *lse).same_device(q, "q").dtype({dl_float32}).contiguous().apart(q, "q").apart(o, "out");
    Expect(op, "lse", *lse).numel((heads == 0 ? 1 : q.size(0)) * p.num_qo_heads);
    p.lse = (*lse).data_ptr<float>();
  }
  p.out_scale = 1.f;
  p.lse_scale = 1.f;
}

inline void SetHeads(Params& p, const char* op, int64_t num_kv_heads) {
  if (num_kv_heads <= 0 || p.num_qo_heads % num_kv_heads != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": q must have a multiple of " << num_kv_heads
                                    << " heads (the heads of k), got " << p.num_qo_heads;
  }
  if (num_kv_heads > INT16_MAX) {
    FLASHINFER_THROW(ArgumentError) << op << ": k must have at most " << INT16_MAX
                                    << " heads (what a work item can name), got " << num_kv_heads;
  }
  p.num_kv_heads = int32_t(num_kv_heads);
  p.kv_heads = FastDivisor(uint32_t(num_kv_heads));
  p.group = FastDivisor(uint32_t(p.num_qo_heads / num_kv_heads));
}

/// k and v are pages [page, page_size, heads, head_dim] (layout 0) or [page, heads, page_size, head_dim]; without the
/// first dimension if not paged.
inline void SetKeys(Params& p, const char* op, const TensorView& q, const TensorView& o, const TensorView& k,
                    const TensorView& v, int64_t layout, bool is_paged) {
  const int first = is_paged ? 1 : 0, n = first + (layout == 0 ? 0 : 1), h = first + (layout == 0 ? 1 : 0);
  const DLDataType dtype = DL_TYPE<Params::DTypeKV>;
  Expect(op, "k", k).same_device(q, "q").dtype({dtype}).rank(first + 3).last_dim_contiguous();
  Expect(op, "v", v).same_device(q, "q").dtype({dtype}).rank(first + 3).last_dim_contiguous();
  Expect(op, "k", k).dim(-1, Stored(Params::HEAD_DIM_QK), "head_dim_qk of the module");
  Expect(op, "v", v).dim(-1, Stored(Params::HEAD_DIM_VO), "head_dim_vo of the module");
  for (int i = 0; i < first + 2; ++i) Expect(op, "v", v).dim(i, k.size(i), "that of k");
  Expect(op, "out", o).apart(k, "k").apart(v, "v");
  CheckReach(op, "k", k);
  CheckReach(op, "v", v);
  SetHeads(p, op, k.size(h));
  p.k = k.data_ptr<Params::DTypeKV>();
  p.v = v.data_ptr<Params::DTypeKV>();
  p.k_stride_page = is_paged ? StrideOf(k, 0) : 0;
  p.v_stride_page = is_paged ? StrideOf(v, 0) : 0;
  p.k_stride_n = StrideOf(k, n);
  p.v_stride_n = StrideOf(v, n);
  p.k_stride_h = StrideOf(k, h);
  p.v_stride_h = StrideOf(v, h);
  p.kv_len = int32_t(k.size(n));
  p.page_size = FastDivisor(is_paged ? uint32_t(k.size(n)) : 1);
}

/// Return the address of at least `count` int32 numbers on the device of q.
inline const int32_t* Indices(const char* op, const char* name, const TensorView& t, const TensorView& q,
                              int64_t count) {
  Expect(op, name, t).same_device(q, "q").dtype({dl_int32}).rank(1).contiguous();
  if (t.size(0) < count) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must have at least " << count << " elements, got "
                                    << t.size(0);
  }
  return t.data_ptr<int32_t>();
}

// ------------------------------------------------------------------------------------------------ plans

inline PlanInfo ReadPlan(const char* op, const Numbers& numbers) {
  if (numbers.size() != PLAN_INFO_SIZE) {
    FLASHINFER_THROW(ArgumentError) << op << ": plan_info must have " << PLAN_INFO_SIZE
                                    << " numbers (what plan() returned), got " << numbers.size();
  }
  int64_t values[PLAN_INFO_SIZE];
  for (int i = 0; i < PLAN_INFO_SIZE; ++i) values[i] = numbers[i];
  return PlanInfo::FromArray(values);
}

/// Place partial states in `bytes` bytes at `at`: outputs, then log-sum-exps.
inline void SetPartials(WorkList& work, char* at, int64_t bytes, int64_t tile) {
  // An empty plan has tiles of no rows.
  const int64_t slots = tile == 0 ? 0 : bytes / int64_t(sizeof(float)) / (tile * (Params::HEAD_DIM_VO + 1));
  work.partial_o = reinterpret_cast<float*>(at);
  work.partial_lse = work.partial_o + slots * tile * Params::HEAD_DIM_VO;
}

/// Return true if `keys` keys of each head should be read with evict-first. Dirty lines that they would displace have
/// to be written to memory first: on an H200 that costs 4 us of the 50 us that 134 MB take. Where keys are several
/// times the cache those lines are displaced anyway, and then reading through the cache is 5 % faster.
inline bool ReadsPastCache([[maybe_unused]] int64_t keys, [[maybe_unused]] int64_t heads) {
#ifdef FLASHINFER_CPU
  return false;
#else
  constexpr int64_t COLUMNS = Stored(Params::HEAD_DIM_QK) + Stored(Params::HEAD_DIM_VO);
  constexpr int64_t ROW_BYTES =
      COLUMNS * DL_TYPE<Params::DTypeKV>.bits / 8;  // host code cannot use sizeof of the device type
  return keys > 0 && keys * heads * ROW_BYTES <= 3 * CacheBytes();
#endif
}

inline WorkList DecodeList(const PlanInfo& info, char* int_ws, char* float_ws) {
  const PlanHeader* header = reinterpret_cast<const PlanHeader*>(int_ws);
  WorkList work{};
  work.items = reinterpret_cast<const WorkItem*>(int_ws + info.decode_items);
  work.has_shares = info.has_shares != 0;
  work.num_items = &header->decode_items;
  work.merges = reinterpret_cast<const MergeItem*>(int_ws + info.decode_merges);
  work.num_merges = &header->decode_merges;
  work.blocks = int32_t(info.decode_blocks);
  work.merge_blocks = int32_t(info.decode_merge_blocks);
#ifndef FLASHINFER_CPU
  work.tickets = reinterpret_cast<int32_t*>(int_ws + info.decode_tickets);
  if constexpr (SERVED_BY_DECODE_KERNEL<Params, DECODE_TILE>) work.arrivals = work.tickets + TICKETS;
#endif
  SetPartials(work, float_ws, info.prefill_partial, DECODE_TILE);
  return work;
}

/// Set WorkList::equal_requests from the plan: chunk_size is stored, the rest follows from its counts.
inline void SetEqualRequests(WorkList& work, const PlanInfo& info, const Params& params) {
  if (info.chunk_size == 0) return;
  const int64_t chunks = info.decode_merge_blocks > 0 ? info.decode_blocks / info.decode_merge_blocks : 1;
  const int64_t batch = std::max<int64_t>(info.decode_blocks / (params.num_kv_heads * chunks), 1);
  const int64_t kv_len = info.keys / batch;
  work.equal_requests = {FastDivisor(uint32_t(chunks)), info.chunk_size,
                         int32_t(DivideUp(kv_len, params.page_size.divisor)), info.qo_len, int32_t(kv_len)};
}

inline WorkList PrefillList(const PlanInfo& info, char* int_ws, char* float_ws) {
  const PlanHeader* header = reinterpret_cast<const PlanHeader*>(int_ws);
  WorkList work{};
  work.items = reinterpret_cast<const WorkItem*>(int_ws + info.prefill_items);
  work.num_items = &header->prefill_items;
  work.merges = reinterpret_cast<const MergeItem*>(int_ws + info.prefill_merges);
  work.num_merges = &header->prefill_merges;
  work.tickets = reinterpret_cast<int32_t*>(int_ws + info.decode_tickets) + 1;
  work.is_by_head = info.is_by_head;
  work.blocks = int32_t(info.prefill_blocks);
  work.merge_blocks = int32_t(info.prefill_merge_blocks);
  SetPartials(work, float_ws + info.prefill_partial, info.float_bytes - info.prefill_partial, info.tile);
  return work;
}

// ------------------------------------------------------------------------------------------------ launches

/// Call f(tile) with the number of rows as a constant.
template <bool HAS_PREFILL, typename F>
Status DispatchTile([[maybe_unused]] int64_t tile, const F& f) {
  if constexpr (!HAS_DECODE_KERNEL) {
    return f(std::integral_constant<int, HOPPER_TILE>{});
  } else {
    if constexpr (HAS_PREFILL && HAS_PREFILL_SM90) {
      if (tile == HOPPER_TILE) return f(std::integral_constant<int, HOPPER_TILE>{});
      if constexpr (HAS_SHORT_TILES) {
        if (tile == SHORT_PREFILL_TILE) return f(std::integral_constant<int, SHORT_PREFILL_TILE>{});
      }
    } else if constexpr (HAS_PREFILL) {
      if constexpr (HasLargePrefillTile(Params::HEAD_DIM_VO)) {
        if (tile == LARGE_PREFILL_TILE) return f(std::integral_constant<int, LARGE_PREFILL_TILE>{});
      }
      if (tile == PREFILL_TILE) return f(std::integral_constant<int, PREFILL_TILE>{});
    }
    return f(std::integral_constant<int, DECODE_TILE>{});
  }
}

/// Op name, stream and options of a launch.
struct LaunchSite {
  const char* op;
  bool enable_pdl;
  Stream stream;
  DLDevice device;
};

template <bool HAS_PREFILL, bool PAGED, bool ALL_MASKED>
void LaunchList(const LaunchSite& site, const Params& params, const WorkList& work, int64_t tile) {
  if (work.blocks == 0) return;
  CheckStatus(site.op, DispatchTile<HAS_PREFILL>(tile, [&](auto rows) {
                constexpr int TILE = decltype(rows)::value;
                return LaunchAttention<Params, TILE, PAGED, ALL_MASKED>(params, work, site.enable_pdl, site.stream);
              }));
}

template <bool HAS_PREFILL>
void LaunchMerges(const LaunchSite& site, const Params& params, const WorkList& work, int64_t tile) {
  if (work.merge_blocks == 0) return;
  CheckStatus(site.op, DispatchTile<HAS_PREFILL>(tile, [&](auto rows) {
                constexpr int TILE = decltype(rows)::value;
                return LaunchMerge<Params, TILE>(params, work, site.enable_pdl, site.stream);
              }));
}

/// Call f(all_masked), which is true if the variant's mask is evaluated for each pair. Refuses `wants_all` for a module
/// without such kernels.
template <typename F>
void DispatchMask(const char* op, bool wants_all, const F& f) {
  if constexpr (HAS_ALL_MASKED) {
    if (wants_all || !HAS_EDGE_MASKED) return f(std::true_type{});
  } else if (wants_all) {
    FLASHINFER_THROW(ArgumentError) << op
                                    << ": the mask must be None (the variant declares no maybe_custom_mask), got one";
  }
  if constexpr (HAS_EDGE_MASKED) f(std::false_type{});
}

/// Validated call. Callers may keep it (csrc/attention_call_cache.h).
struct CheckedCall {
  Params params;
  WorkList decode_list, prefill_list;
  int64_t tile;  ///< rows of a tile of `prefill_list`
  int64_t keys;  ///< keys of all requests; 0: unknown
  DLDevice device;
  int32_t rows, requests, layout;
  bool is_paged, all_masked, enable_pdl;
};

/// Build the call whose tensors are in `params`; the caller adds requests, layout, is_paged and enable_pdl.
inline CheckedCall CallOf(const char* op, const Params& params, const PlanInfo& info, const TensorView& float_ws,
                          const TensorView& int_ws, const TensorView& q) {
  CheckSize(op, "float_workspace_buffer", float_ws, info.float_bytes);
  CheckSize(op, "int_workspace_buffer", int_ws, info.int_bytes);
  CheckedCall call{};
  call.params = params;
  call.decode_list = DecodeList(info, int_ws.data_ptr<char>(), float_ws.data_ptr<char>());
  SetEqualRequests(call.decode_list, info, params);
  call.decode_list.reads_past_cache = ReadsPastCache(info.keys, params.num_kv_heads);
  call.prefill_list = PrefillList(info, int_ws.data_ptr<char>(), float_ws.data_ptr<char>());
  call.tile = info.tile;
  call.keys = info.keys;
  call.device = q.device();
  call.rows = int32_t(q.size(0));
  return call;
}

template <typename P, typename = void>
struct HasScale : std::false_type {};
template <typename P>
struct HasScale<P, decltype(void(P::sm_scale))> : std::true_type {};

/// Refuse scales that are not positive: kernels take the largest q.k for the largest logit, and -inf times the scale
/// for -inf.
template <typename P = Params>
void CheckScale(const char* op, const P& params) {
  if constexpr (HasScale<P>::value) {
    if (!(params.sm_scale > 0)) {
      FLASHINFER_THROW(ArgumentError) << op << ": sm_scale must be a positive number (scales of q and k included), got "
                                      << double(params.sm_scale);
    }
  }
}

/// A list with its parameters.
struct Part {
  const Params& params;
  const WorkList& work;
};

/// Fuse a prefill list and a decode list into one launch; return false if they do not gain by it, or if an SM cannot
/// hold a block of each.
inline bool TryLaunchFused([[maybe_unused]] const LaunchSite& site, [[maybe_unused]] const Part& prefill_list,
                           [[maybe_unused]] int64_t tile, [[maybe_unused]] const Part& decode_list) {
  if constexpr (HAS_FUSED) {
    if (prefill_list.work.blocks == 0 || !decode_list.work.has_shares || (HAS_PREFILL_SM90 && tile != FUSED_TILE) ||
        !Planner::FusesLists(tile, decode_list.work.blocks, prefill_list.work.blocks, FusedBlocks<Params, FUSED_TILE>(),
                             HAS_PREFILL_SM90)) {
      return false;
    }
    const Status status = LaunchFused<Params, FUSED_TILE>(prefill_list.params, prefill_list.work, decode_list.params,
                                                          decode_list.work, site.enable_pdl, site.stream);
#ifndef FLASHINFER_CPU
    if (HAS_PREFILL_SM90 && status == cudaErrorNotSupported) return false;  // strides that TMA cannot read
#endif
    CheckStatus(site.op, status);
    return true;
  }
  return false;
}

/// Launch a plan: lists first, then merges.
template <bool HAS_PREFILL, bool PAGED>
void Launch(const char* op, const CheckedCall& call) {
  CheckScale(op, call.params);
  const DeviceGuard guard(call.device);
  const LaunchSite site{op, UsePdl(call.enable_pdl, call.device), get_stream(call.device), call.device};
  DispatchMask(op, call.all_masked, [&](auto masked) {
    constexpr bool ALL_MASKED = decltype(masked)::value;
    if constexpr (HAS_PREFILL && PAGED && !ALL_MASKED) {
      if (TryLaunchFused(site, {call.params, call.prefill_list}, call.tile, {call.params, call.decode_list})) return;
    }
    LaunchList<false, PAGED, ALL_MASKED>(site, call.params, call.decode_list, DECODE_TILE);
    if constexpr (HAS_PREFILL) LaunchList<true, PAGED, ALL_MASKED>(site, call.params, call.prefill_list, call.tile);
  });
  LaunchMerges<false>(site, call.params, call.decode_list, DECODE_TILE);
  if constexpr (HAS_PREFILL) LaunchMerges<true>(site, call.params, call.prefill_list, call.tile);
}

/// Let blocks of the Hopper kernel take the items of one request from a counter; `blocks` run at once.
inline void SetTickets([[maybe_unused]] const LaunchSite& site, [[maybe_unused]] WorkList& work,
                       [[maybe_unused]] int64_t blocks) {
#ifndef FLASHINFER_CPU
  work.tickets = ArrivalsOf(site.stream, site.device, 1);
  work.is_by_head = work.tickets != nullptr && work.blocks >= 8 * blocks;  // as in Planner::FollowsCache
#endif
}

/// One request, cut evenly if its tiles are too few to fill the device. Partial states go to `tmp`.
template <bool HAS_PREFILL>
void RunPlannedSingle(const LaunchSite& site, const Params& params, const TensorView& tmp, bool all_masked) {
  const int64_t rows = int64_t(params.qo_len) * params.group.divisor, heads = params.num_kv_heads;
  if (rows == 0) return;
  CheckScale(site.op, params);
  const auto [tile, blocks] = SingleTileOf<HAS_PREFILL>(rows);
  const int64_t slot_bytes = tile * (Params::HEAD_DIM_VO + 1) * int64_t(sizeof(float));
  WorkList work = PlanSingle(rows, heads, params.kv_len, tile, blocks, ByteSize(tmp) / slot_bytes);
  work.reads_past_cache = ReadsPastCache(params.kv_len, heads);
  SetPartials(work, tmp.data_ptr<char>(), work.merge_blocks > 0 ? work.blocks * slot_bytes : 0, tile);
#ifndef FLASHINFER_CPU
  if (SERVED_BY_DECODE_KERNEL<Params, DECODE_TILE> && tile == DECODE_TILE && work.merge_blocks > 0) {
    work.arrivals = ArrivalsOf(site.stream, site.device, work.merge_blocks);
  }
#endif
  if (HAS_PREFILL && HAS_PREFILL_SM90 && tile == HOPPER_TILE) SetTickets(site, work, blocks);
  DispatchMask(site.op, all_masked, [&, tile = tile](auto masked) {
    LaunchList<HAS_PREFILL, false, decltype(masked)::value>(site, params, work, tile);
  });
  LaunchMerges<HAS_PREFILL>(site, params, work, tile);
}

template <typename P, typename = void>
struct HasMask : std::false_type {};
template <typename P>
struct HasMask<P, decltype(void(P::maybe_custom_mask))> : std::true_type {};
template <typename P, typename = void>
struct HasPrefix : std::false_type {};
template <typename P>
struct HasPrefix<P, decltype(void(P::maybe_prefix_len_ptr), void(P::maybe_token_pos_in_items_ptr))> : std::true_type {};

/// Multi-item scoring overrides other masks.
template <typename P>
void SetMaskMode(P& p, const char* op, int64_t mask_mode) {
  p.mask_mode = int32_t(mask_mode);
  if (mask_mode < 0 || mask_mode > int64_t(MaskMode::kMultiItemScoring)) {
    FLASHINFER_THROW(ArgumentError) << op << ": mask_mode must be 0 to 3, got " << mask_mode;
  }
  if (mask_mode != int64_t(MaskMode::kMultiItemScoring)) return;
  bool has_items = false;
  if constexpr (HasPrefix<P>::value) {
    has_items = p.maybe_prefix_len_ptr != nullptr && p.maybe_token_pos_in_items_ptr != nullptr;
  }
  if constexpr (HasMask<P>::value) p.maybe_custom_mask = nullptr;
  if (!has_items) {
    FLASHINFER_THROW(ArgumentError)
        << op << ": prefix_len_ptr or token_pos_in_items_ptr must be tensors (multi-item scoring), got None";
  }
}

/// Return true if a mask mode evaluates the variant's mask for each pair.
inline bool WantsAll(int64_t mask_mode) {
  return mask_mode == int64_t(MaskMode::kCustom) || mask_mode == int64_t(MaskMode::kMultiItemScoring);
}

}  // namespace attention
}  // namespace flashinfer
