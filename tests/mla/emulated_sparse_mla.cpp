// SPDX-License-Identifier: Apache-2.0
// Sparse MLA on CUDA, for tests/emulation.
#include <flashinfer/attention/sparse_mla/kernel.cuh>

using namespace flashinfer;
using sparse_mla::Cache;

/// Tensors and sizes of a call, as Python packs them. Strides are in elements, those of the cache in bytes.
struct Call {
  void *q, *kv, *indices, *lengths, *sinks, *out, *lse, *partials;
  int64_t tokens, heads, dim, top_k, pages, page_size, page_stride, slot_stride, splits, kind;
  double scale, kv_scale;
};

EMULATION_EXPORT int sparse_mla_run(const Call* c) {
  SparseMlaParams p{};
  p.q = c->q, p.kv = c->kv, p.indices = static_cast<int32_t*>(c->indices),
  p.lengths = static_cast<int32_t*>(c->lengths);
  p.sinks = static_cast<float*>(c->sinks), p.out = c->out, p.lse = static_cast<float*>(c->lse);
  p.partial_o = static_cast<float*>(c->partials);
  p.partial_lse = p.partial_o + c->splits * c->tokens * c->heads * sparse_mla::D_V;
  p.q_stride_h = c->dim, p.q_stride_n = c->heads * c->dim, p.indices_stride = c->top_k;
  p.kv_stride_page = c->page_stride, p.kv_stride_slot = c->slot_stride, p.rows = c->pages * c->page_size;
  p.page_size = FastDivisor(uint32_t(c->page_size));
  p.tokens = int32_t(c->tokens), p.heads = int32_t(c->heads), p.top_k = int32_t(c->top_k);
  p.splits = int32_t(c->splits);
  p.scale_log2 = float(c->scale * c->kv_scale * 1.44269504088896340736), p.out_scale = float(c->kv_scale);
  p.lse_scale = 1.f;
  const bool has_rope = c->dim != sparse_mla::D_V;
  if (c->kind == 0 && has_rope) return int(SparseMla<__nv_bfloat16, Cache::kLikeQuery, true>(p, nullptr));
  if (c->kind == 0) return int(SparseMla<__nv_bfloat16, Cache::kLikeQuery, false>(p, nullptr));
  if (c->kind == 1 && has_rope) return int(SparseMla<__nv_bfloat16, Cache::kE4m3, true>(p, nullptr));
  if (c->kind == 1) return int(SparseMla<__nv_bfloat16, Cache::kE4m3, false>(p, nullptr));
  return int(SparseMla<__nv_bfloat16, Cache::kPacked, true>(p, nullptr));
}
