// SPDX-License-Identifier: Apache-2.0
// Launchers of a batch_mla module: MLA over pages. All heads share one key; the first part of the key is the value.
#include <algorithm>

#include "attention_call_cache.h"

using namespace flashinfer;
using namespace flashinfer::attention;

namespace {

constexpr const char* OP = "batch_mla";
constexpr int64_t ANY_PAGE_SIZE = int64_t{1} << 30;  // key counts are given, so the plan does not need the page size

/// Set the tiles of the plan. Kernels for SM90 have one list: the decode list, with tiles of PREFILL_TILE rows.
template <bool IS_SM90>
void SetLists(PlanInput& in) {
  if constexpr (IS_SM90) {
    in.head_dim_vo = Params::HEAD_DIM_VO;
    in.decode_tile = PREFILL_TILE;
    in.decode_blocks = CachedBlocks<PREFILL_TILE>();
  } else {
    SetTiles<true>(in);
  }
}

template <bool IS_SM90>
void LaunchLists(const CheckedCall& call) {
  if constexpr (IS_SM90) {
    CheckScale(OP, call.params);
    const DeviceGuard guard(call.device);
    const Stream stream = get_stream(call.device);
    const bool enable_pdl = UsePdl(call.enable_pdl, call.device);
    CheckStatus(OP,
                LaunchAttention<Params, PREFILL_TILE, true, false>(call.params, call.decode_list, enable_pdl, stream));
  } else {
    Launch<true, true>(OP, call);
  }
}

PlanInput InputOf(const TensorView& qo_indptr, const TensorView& kv_indptr, const TensorView& kv_lens,
                  int64_t num_heads, bool causal, int64_t page_size, bool enable_cuda_graph, int64_t max_rows) {
  const int64_t batch_size = kv_lens.numel();
  PlanInput in{};
  in.batch_size = int32_t(batch_size);
  in.qo_indptr = HostArray(OP, "qo_indptr", qo_indptr, batch_size + 1);
  in.kv_indptr = HostArray(OP, "kv_indptr", kv_indptr, batch_size + 1);
  in.kv_lens = HostArray(OP, "kv_len_arr", kv_lens, batch_size);
  in.page_size = int32_t(page_size);
  in.num_qo_heads = int32_t(num_heads);
  in.num_kv_heads = 1;
  in.causal = causal;
  in.window_left = -1;
  in.publishes_works = true;
  in.cuda_graph = enable_cuda_graph;
  in.max_rows = int32_t(max_rows >= 0 ? max_rows : in.qo_indptr[batch_size]);
  // A captured launch serves plans of one row for each request, whatever the first plan had: engines plan with fewer rows
  // before the capture, and through the entry without a limit.
  if (enable_cuda_graph) in.max_rows = std::max(in.max_rows, int32_t(batch_size));
  SetLists<IS_MLA_SM90>(in);
  return in;
}

/// Set the rotary columns of q and k, which are in separate tensors.
void SetRotary(Params& p, const TensorView& q, const Optional<TensorView>& q_pe, const TensorView& ckv,
               const Optional<TensorView>& kpe) {
  if constexpr (Params::HEAD_DIM_PE > 0) {
    if (!q_pe.has_value() || !kpe.has_value()) {
      FLASHINFER_THROW(ArgumentError) << OP << ": q_pe or kpe_cache must be tensors, got None";
    }
    const char* because = "head_dim_kpe of the module";
    Expect(OP, "q_pe", *q_pe).same_device(q, "q_nope").same_dtype(q, "q_nope").rank(3).last_dim_contiguous();
    Expect(OP, "q_pe", *q_pe).dim(0, q.size(0), "q_nope.shape[0]").dim(1, q.size(1), "q_nope.shape[1]");
    Expect(OP, "q_pe", *q_pe).dim(2, Params::HEAD_DIM_PE, because);
    Expect(OP, "kpe_cache", *kpe).same_device(q, "q_nope").same_dtype(ckv, "ckv_cache").rank(3).last_dim_contiguous();
    Expect(OP, "kpe_cache", *kpe).dim(0, ckv.size(0), "ckv_cache.shape[0]").dim(1, ckv.size(1), "ckv_cache.shape[1]");
    Expect(OP, "kpe_cache", *kpe).dim(2, Params::HEAD_DIM_PE, because);
    CheckReach(OP, "kpe_cache", *kpe);
    p.q_pe = (*q_pe).data_ptr<Params::DTypeQ>();
    p.k_pe = (*kpe).data_ptr<Params::DTypeKV>();
    p.q_pe_stride_n = StrideOf(*q_pe, 0);
    p.q_pe_stride_h = StrideOf(*q_pe, 1);
    p.k_pe_stride_page = StrideOf(*kpe, 0);
    p.k_pe_stride_n = StrideOf(*kpe, 1);
  }
}

}  // namespace

/// Plan that serving engines call between replays of a CUDA graph: the launch depends only on rows and requests.
Numbers batch_mla_plan(TensorView float_ws, TensorView int_ws, TensorView, TensorView qo_indptr, TensorView kv_indptr,
                       TensorView kv_lens, int64_t num_heads, int64_t, bool causal) {
  DeviceGuard guard(int_ws.device());
  return MakePlan(OP, InputOf(qo_indptr, kv_indptr, kv_lens, num_heads, causal, ANY_PAGE_SIZE, true, -1),
                  {float_ws, int_ws});
}

Numbers batch_mla_plan_ext(TensorView float_ws, TensorView int_ws, TensorView, TensorView qo_indptr,
                           TensorView kv_indptr, TensorView kv_lens, int64_t num_heads, int64_t, bool causal,
                           int64_t page_size, bool enable_cuda_graph, int64_t max_rows) {
  DeviceGuard guard(int_ws.device());
  return MakePlan(OP, InputOf(qo_indptr, kv_indptr, kv_lens, num_heads, causal, page_size, enable_cuda_graph, max_rows),
                  {float_ws, int_ws});
}

/// Write a plan as published releases number it (flashinfer.mla): byte offsets of arrays in the int workspace. Of works:
/// first row of the request (2), first key (13), end of the keys (14), which engines rewrite, and their number, the entry
/// [1] of the array at [15]. [3] - [2] is the size of these arrays. What has no counterpart here is 0.
/// They go to a host tensor because Python takes 1 us for each number of a container.
void batch_mla_published_plan(TensorView out, Numbers plan_info) {
  constexpr int64_t COUNT = 18;
  Expect(OP, "out", out).dtype({dl_int64}).rank(1).dim(0, COUNT, "published numbers").contiguous();
  if (out.device().device_type != kDLCPU) {
    FLASHINFER_THROW(ArgumentError) << OP << ": out must be on cpu, got " << out.device();
  }
  const PublishedWorks works = PublishedWorks::Of(ReadPlan(OP, plan_info));
  int64_t* const numbers = out.data_ptr<int64_t>();
  std::fill_n(numbers, COUNT, 0);
  numbers[0] = numbers[1] = 1;
  numbers[2] = works.q_indptr, numbers[3] = works.q_indptr + works.capacity * int64_t(sizeof(int32_t));
  numbers[13] = works.kv_start, numbers[14] = works.kv_end, numbers[15] = works.work_indptr;
}

namespace {

/// Let the lists of a call end the keys of their items where the plan in the int workspace says.
void SetEnds(CheckedCall& call, const PlanInfo& info, const TensorView& int_ws) {
  const PublishedWorks works = PublishedWorks::Of(info);
  call.decode_list.kv_ends = reinterpret_cast<const int32_t*>(int_ws.data_ptr<char>() + works.kv_end);
  call.prefill_list.kv_ends = call.decode_list.kv_ends + works.prefill;
}

/// Set the tensors of a call in `p`. The caller sets all other members, before or after.
void SetTensors(Params& p, const TensorView& q_nope, const Optional<TensorView>& q_pe, const TensorView& ckv_cache,
                const Optional<TensorView>& kpe_cache, const TensorView& o, const Optional<TensorView>& lse,
                int64_t num_heads, int64_t page_size, double sm_scale, bool return_lse_base_on_e) {
  Expect(OP, "q_nope", q_nope).rank(3).dim(1, num_heads, "num_heads");
  p.lse = nullptr;
  SetQueries(p, OP, q_nope, o, lse);
  Expect(OP, "ckv_cache", ckv_cache)
      .same_device(q_nope, "q_nope")
      .dtype({DL_TYPE<Params::DTypeKV>})
      .rank(3)
      .dim(1, page_size, "page_size")
      .dim(2, Params::HEAD_DIM_VO, "head_dim_ckv of the module")
      .last_dim_contiguous();
  Expect(OP, "out", o).apart(ckv_cache, "ckv_cache").apart(kpe_cache, "kpe_cache").apart(q_pe, "q_pe");
  CheckReach(OP, "ckv_cache", ckv_cache);
  SetHeads(p, OP, 1);
  p.k = p.v = ckv_cache.data_ptr<Params::DTypeKV>();
  p.k_stride_page = p.v_stride_page = StrideOf(ckv_cache, 0);
  p.k_stride_n = p.v_stride_n = StrideOf(ckv_cache, 1);
  p.num_pages = ckv_cache.size(0);
  SetRotary(p, q_nope, q_pe, ckv_cache, kpe_cache);
  p.sm_scale = sm_scale;
  if (return_lse_base_on_e) p.lse_scale = 0.693147180559945309417f;
}

CheckedCall Check(const TensorView& float_ws, const TensorView& int_ws, const Numbers& plan_info,
                  const TensorView& q_nope, const Optional<TensorView>& q_pe, const TensorView& ckv_cache,
                  const Optional<TensorView>& kpe_cache, const TensorView& kv_indices, const TensorView& o,
                  const Optional<TensorView>& lse, int64_t mask_mode, int64_t num_heads, int64_t page_size,
                  double sm_scale, bool return_lse_base_on_e, bool enable_pdl) {
  const PlanInfo info = ReadPlan(OP, plan_info);
  Params p{};
  SetTensors(p, q_nope, q_pe, ckv_cache, kpe_cache, o, lse, num_heads, page_size, sm_scale, return_lse_base_on_e);
  p.page_size = FastDivisor(uint32_t(page_size));
  p.kv_indices = Indices(OP, "kv_indices", kv_indices, q_nope, 0);
  p.window_left = -1;
  p.mask_mode = int32_t(mask_mode);
  CheckedCall call = CallOf(OP, p, info, float_ws, int_ws, q_nope);
  SetEnds(call, info, int_ws);
  if (IS_MLA_SM90) SetPartials(call.decode_list, float_ws.data_ptr<char>(), info.prefill_partial, PREFILL_TILE);
  call.enable_pdl = enable_pdl;
  return call;
}

}  // namespace

void batch_mla_run(TensorView float_ws, TensorView int_ws, Numbers plan_info, TensorView q_nope,
                   Optional<TensorView> q_pe, TensorView ckv_cache, Optional<TensorView> kpe_cache,
                   TensorView kv_indices, TensorView o, Optional<TensorView> lse, int64_t mask_mode, int64_t num_heads,
                   int64_t page_size, double sm_scale, bool return_lse_base_on_e, bool enable_pdl) {
  LaunchLists<IS_MLA_SM90>(Check(float_ws, int_ws, plan_info, q_nope, q_pe, ckv_cache, kpe_cache, kv_indices, o, lse,
                                 mask_mode, num_heads, page_size, sm_scale, return_lse_base_on_e, enable_pdl));
}

/// Run with scales of an fp8 cache: `out_scale` multiplies the output, and `latent_scales` each key, 128 columns at a time.
void batch_mla_run_scaled(TensorView float_ws, TensorView int_ws, Numbers plan_info, TensorView q_nope,
                          Optional<TensorView> q_pe, TensorView ckv_cache, Optional<TensorView> kpe_cache,
                          TensorView kv_indices, TensorView o, Optional<TensorView> lse, int64_t mask_mode,
                          int64_t num_heads, int64_t page_size, double sm_scale, bool return_lse_base_on_e,
                          bool enable_pdl, double out_scale, Optional<TensorView> latent_scales) {
  CheckedCall call = Check(float_ws, int_ws, plan_info, q_nope, q_pe, ckv_cache, kpe_cache, kv_indices, o, lse,
                           mask_mode, num_heads, page_size, sm_scale, return_lse_base_on_e, enable_pdl);
  call.params.out_scale = float(out_scale);
  if (latent_scales.has_value()) {
    const TensorView& scales = *latent_scales;
    const char* name = "ckv_scale_arr";
    if (!IS_MLA_SM90 || DL_TYPE<Params::DTypeKV>.bits != 8) {
      FLASHINFER_THROW(ArgumentError) << OP << ": " << name << " must be None in this module, got a tensor";
    }
    Expect(OP, name, scales).same_device(q_nope, "q_nope").dtype({dl_float32}).rank(3).contiguous();
    Expect(OP, name, scales).dim(0, ckv_cache.size(0), "ckv_cache.shape[0]").dim(1, page_size, "page_size");
    Expect(OP, name, scales).dim(2, Params::HEAD_DIM_VO / 128, "a scale for 128 columns");
    call.params.latent_scales = scales.data_ptr<float>();
  }
  LaunchLists<IS_MLA_SM90>(call);
}

/// Run, and store the call in `record` for rerun().
void batch_mla_record_run(TensorView record, bool is_capturable, TensorView float_ws, TensorView int_ws,
                          Numbers plan_info, TensorView q_nope, Optional<TensorView> q_pe, TensorView ckv_cache,
                          Optional<TensorView> kpe_cache, TensorView kv_indices, TensorView o, Optional<TensorView> lse,
                          int64_t mask_mode, int64_t num_heads, int64_t page_size, double sm_scale,
                          bool return_lse_base_on_e, bool enable_pdl) {
  void* const to = RecordAddress(OP, record);
  const CheckedCall call = Check(float_ws, int_ws, plan_info, q_nope, q_pe, ckv_cache, kpe_cache, kv_indices, o, lse,
                                 mask_mode, num_heads, page_size, sm_scale, return_lse_base_on_e, enable_pdl);
  LaunchLists<IS_MLA_SM90>(call);
  WriteRecord(to, call, is_capturable);
}

/// Repeat the call of a record with other tensors of equal shapes.
void batch_mla_rerun(TensorView record, TensorView q_nope, Optional<TensorView> q_pe, TensorView ckv_cache,
                     Optional<TensorView> kpe_cache, TensorView o, Optional<TensorView> lse, double sm_scale,
                     bool return_lse_base_on_e, bool enable_pdl) {
  const Record kept = ReadRecord(OP, record);
  CheckedCall call = kept.call;
  Params& p = call.params;
  SetTensors(p, q_nope, q_pe, ckv_cache, kpe_cache, o, lse, p.num_qo_heads, p.page_size.divisor, sm_scale,
             return_lse_base_on_e);
  if (lse.has_value()) Expect(OP, "lse", *lse).rank(2).dim(0, q_nope.size(0), "q_nope.shape[0]");
  if (!SameDevice(q_nope.device(), call.device) || q_nope.size(0) != call.rows) {
    FLASHINFER_THROW(ArgumentError) << OP << ": q_nope must have the shape that was recorded, got another";
  }
  if (!kept.is_capturable) RefuseCapture(OP, get_stream(call.device));
  call.enable_pdl = enable_pdl;
  LaunchLists<IS_MLA_SM90>(call);
}
