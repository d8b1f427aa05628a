// SPDX-License-Identifier: Apache-2.0
// MLA decode for SM90, planned and merged as a module does it (csrc/batch_mla.cu), for tests/emulation.
#include <flashinfer/ptx/math.cuh>

// Loads past the first cache, which the merge uses.
inline float __ldcg(const float* p) { return *p; }
inline float4 __ldcg(const float4* p) { return *p; }

#include <flashinfer/attention/plan/planner.h>
#include <flashinfer/attention/variants.h>

namespace flashinfer {

template <bool use_custom_mask>
using Variant = DefaultAttention<false, false, false, false>;

template <typename T, typename Stored = T, int PE = 64>
struct Latent : MlaParams<T, Stored, T, int32_t> {
  static constexpr int HEAD_DIM_QK = 512 + PE, HEAD_DIM_VO = 512, HEAD_DIM_PE = PE;
  static constexpr PosEncodingMode POS_ENCODING = PosEncodingMode::kNone;
  double sm_scale;
};

}  // namespace flashinfer

#include <flashinfer/attention/mla_sm90/kernel.cuh>
#include <flashinfer/attention/mla_sm90/launch.cuh>

using namespace flashinfer;
using namespace flashinfer::attention;

/// Host arrays and sizes of a batch, as Python packs them.
struct Batch {
  int32_t *qo_indptr, *kv_indptr, *kv_lens, *kv_indices;
  int64_t requests, heads, page_size, pages, causal, blocks;
  int32_t* valid;  // keys of each row of q as rewritten after the plan, or null
};

struct Planned {
  std::vector<char> lists, floats;
  WorkList work{};

  explicit Planned(const Batch& b) {
    PlanInput in{};
    in.batch_size = int32_t(b.requests);
    in.qo_indptr = b.qo_indptr, in.kv_indptr = b.kv_indptr, in.kv_lens = b.kv_lens;
    in.page_size = int32_t(b.page_size), in.num_qo_heads = int32_t(b.heads), in.num_kv_heads = 1;
    in.head_dim_vo = 512, in.causal = b.causal != 0, in.window_left = -1;
    in.decode_tile = mla::ROWS, in.decode_blocks = int32_t(b.blocks);
    in.publishes_works = true;
    PlanOutput out;
    Planner(in, out).Run();
    const PlanInfo& info = out.info;
    lists.resize(info.int_bytes + 16), floats.resize(info.float_bytes + 16, char(0xff));
    char* const at = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(lists.data()) + 15) / 16 * 16);
    Planner::Write(out, at);
    const PublishedWorks works = PublishedWorks::Of(info);
    const auto array = [&](int64_t offset) { return reinterpret_cast<int32_t*>(at + offset); };
    for (int i = 0; b.valid != nullptr && i < array(works.work_indptr)[1]; ++i) {
      int32_t& end = array(works.kv_end)[i];
      end = std::max(std::min(end, b.valid[array(works.q_indptr)[i]]), array(works.kv_start)[i]);
    }
    work.kv_ends = array(works.kv_end);
    const auto* const header = reinterpret_cast<const PlanHeader*>(at);
    work.items = reinterpret_cast<const WorkItem*>(at + info.decode_items);
    work.has_shares = true;
    work.num_items = &header->decode_items;
    work.merges = reinterpret_cast<const MergeItem*>(at + info.decode_merges);
    work.num_merges = &header->decode_merges;
    work.blocks = int32_t(info.decode_blocks);
    work.merge_blocks = int32_t(info.decode_merge_blocks);
    const int64_t slots = info.prefill_partial / int64_t(sizeof(float)) / (mla::ROWS * 513);
    work.partial_o = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(floats.data()) + 15) / 16 * 16);
    work.partial_lse = work.partial_o + slots * mla::ROWS * 512;
  }
};

template <typename T, typename Stored = T, int PE = 64>
int Run(const Batch& b, T* q, T* q_pe, Stored* ckv, Stored* kpe, T* o, float* lse, double sm_scale,
        const float* scales = nullptr, float out_scale = 1.f) {
  using P = Latent<T, Stored, PE>;
  P p{};
  p.latent_scales = scales;
  p.q = q, p.q_pe = q_pe, p.k = p.v = ckv, p.k_pe = kpe, p.o = o, p.lse = lse;
  p.q_stride_h = p.o_stride_h = 512, p.q_stride_n = p.o_stride_n = b.heads * 512;
  p.q_pe_stride_h = 64, p.q_pe_stride_n = b.heads * 64;
  p.k_stride_n = p.v_stride_n = 512, p.k_stride_page = p.v_stride_page = b.page_size * 512;
  p.k_pe_stride_n = 64, p.k_pe_stride_page = b.page_size * 64;
  p.num_pages = b.pages, p.kv_indices = b.kv_indices;
  p.page_size = FastDivisor(uint32_t(b.page_size)), p.kv_heads = FastDivisor(1),
  p.group = FastDivisor(uint32_t(b.heads));
  p.num_qo_heads = int32_t(b.heads), p.num_kv_heads = 1;
  p.window_left = -1, p.mask_mode = int32_t(b.causal), p.lse_scale = 1.f, p.sm_scale = sm_scale;
  p.out_scale = out_scale;
  const Planned plan(b);
  return int(LaunchAttention<P, mla::ROWS, true, false>(p, plan.work, false, nullptr));
}

EMULATION_EXPORT int mla_bf16(const Batch* b, __nv_bfloat16* q, __nv_bfloat16* q_pe, __nv_bfloat16* ckv,
                              __nv_bfloat16* kpe, __nv_bfloat16* o, float* lse, double sm_scale) {
  return Run(*b, q, q_pe, ckv, kpe, o, lse, sm_scale);
}
EMULATION_EXPORT int mla_f16(const Batch* b, __half* q, __half* q_pe, __half* ckv, __half* kpe, __half* o, float* lse,
                             double sm_scale) {
  return Run(*b, q, q_pe, ckv, kpe, o, lse, sm_scale);
}
EMULATION_EXPORT int mla_nope(const Batch* b, __nv_bfloat16* q, __nv_bfloat16* q_pe, __nv_bfloat16* ckv,
                              __nv_bfloat16* kpe, __nv_bfloat16* o, float* lse, double sm_scale) {
  return Run<__nv_bfloat16, __nv_bfloat16, 0>(*b, q, q_pe, ckv, kpe, o, lse, sm_scale);
}
EMULATION_EXPORT int mla_fp8(const Batch* b, __nv_bfloat16* q, __nv_bfloat16* q_pe, __nv_fp8_e4m3* ckv,
                             __nv_fp8_e4m3* kpe, __nv_bfloat16* o, float* lse, double sm_scale, const float* scales,
                             double out_scale) {
  return Run(*b, q, q_pe, ckv, kpe, o, lse, sm_scale, scales, float(out_scale));
}
EMULATION_EXPORT int mla_fp8_nope(const Batch* b, __nv_bfloat16* q, __nv_bfloat16* q_pe, __nv_fp8_e4m3* ckv,
                                  __nv_fp8_e4m3* kpe, __nv_bfloat16* o, float* lse, double sm_scale,
                                  const float* scales, double out_scale) {
  return Run<__nv_bfloat16, __nv_fp8_e4m3, 0>(*b, q, q_pe, ckv, kpe, o, lse, sm_scale, scales, float(out_scale));
}
/// Return the number of items and of merges of a plan, as items * 1000 + merges.
EMULATION_EXPORT int mla_counts(const Batch* b) {
  const Planned plan(*b);
  int items = 0;
  for (int i = 0; i < *plan.work.num_items; ++i) {
    for (int at = i; at >= 0; at = plan.work.items[at].next) ++items;
  }
  return items * 1000 + *plan.work.num_merges;
}
