// SPDX-License-Identifier: Apache-2.0
// Launchers of the append operators: argument checks, forms of the cache, stream.
#include "page_arguments.h"
// clang-format off
#if defined(FLASHINFER_CPU)
#include <flashinfer/page_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/page.cuh>
#endif
// clang-format on

using flashinfer::AppendParams;
using flashinfer::AppendPart;
using flashinfer::BatchIndicesParams;
using namespace flashinfer::page;

namespace {

AppendPart PartOf(const TensorView& rows, const CacheView& cache) {
  const int64_t item = ItemBytes(rows);
  const flashinfer::TokenStride stride{rows.stride(0) * item, rows.ndim() == 3 ? rows.stride(1) * item : 0};
  return {rows.data_ptr(), cache.data, stride, Scaled(cache.stride, item), rows.size(-1) * item};
}

void Append(const char* op, const TensorView& rows, AppendParams params, bool validate) {
  DeviceGuard guard(rows.device());
  params.enable_pdl = UsePdl(true, rows.device());
  const flashinfer::Stream stream = get_stream(rows.device());
  Validate(op, params.table, validate, stream);
  CheckStatus(op, flashinfer::AppendPaged(params, stream));
}

/// Validate and view a cache (pages, page_size, dim) of compressed keys or of their rotary part.
CacheView LatentView(const char* op, const char* name, const TensorView& t, const TensorView& rows, const char* of) {
  Expect(op, name, t)
      .same_device(rows, of)
      .same_dtype(rows, of)
      .rank(3)
      .dim(2, rows.size(1), of)
      .last_dim_contiguous()
      .distinct();
  return {t.data_ptr<char>(), t.size(0), t.size(1), 1, t.size(2), {t.stride(0), t.stride(1), 0}};
}

}  // namespace

// The appends return false, having done nothing, when an index tensor is not int32: the caller converts and tries
// again.

bool append_paged_kv_cache(TensorView append_key, TensorView append_value, TensorView cache,
                           Optional<TensorView> value_cache, bool is_hnd, bool validate, TensorView batch_indices,
                           TensorView positions, TensorView kv_indices, TensorView kv_indptr) {
  const char* op = "append_paged_kv_cache";
  const IndexTensors indices{batch_indices, positions, kv_indices, kv_indptr};
  if (!indices.AreInt32()) return false;
  Expect(op, "append_key", append_key).on_device();
  ExpectRows(op, "append_key", append_key, append_key);
  ExpectRows(op, "append_value", append_value, append_key);
  const bool is_pair = value_cache.has_value();
  const TensorView values = is_pair ? value_cache.value() : cache;
  const char* key_name = is_pair ? "paged_kv_cache[0]" : "paged_kv_cache";
  const char* value_name = is_pair ? "paged_kv_cache[1]" : "paged_kv_cache";
  Expect(op, key_name, cache).same_device(append_key, "append_key").same_dtype(append_key, "append_key");
  Expect(op, value_name, values).same_device(append_key, "append_key").same_dtype(append_key, "append_key");
  const CacheView k = ViewOf(op, key_name, cache, is_hnd, is_pair ? -1 : 0);
  const CacheView v = ViewOf(op, value_name, values, is_hnd, is_pair ? -1 : 1);
  ExpectSizes(op, key_name, k, k, append_key.size(1), append_key.size(2));
  ExpectSizes(op, value_name, v, k, append_key.size(1), append_value.size(2));
  AppendParams params{};
  params.table = TableOf(op, indices, append_key, k.num_pages, k.page_size);
  params.num_heads = append_key.size(1);
  params.key = PartOf(append_key, k);
  params.value = PartOf(append_value, v);
  Append(op, append_key, params, validate);
  return true;
}

bool append_paged_mla_kv_cache(TensorView append_ckv, TensorView append_kpe, TensorView ckv_cache, TensorView kpe_cache,
                               bool validate, TensorView batch_indices, TensorView positions, TensorView kv_indices,
                               TensorView kv_indptr) {
  const char* op = "append_paged_mla_kv_cache";
  const IndexTensors indices{batch_indices, positions, kv_indices, kv_indptr};
  if (!indices.AreInt32()) return false;
  Expect(op, "append_ckv", append_ckv).on_device().rank(2).last_dim_contiguous();
  Expect(op, "append_kpe", append_kpe)
      .same_device(append_ckv, "append_ckv")
      .same_dtype(append_ckv, "append_ckv")
      .rank(2)
      .dim(0, append_ckv.size(0), "append_ckv.shape[0]")
      .last_dim_contiguous();
  for (auto [name, t] : {std::pair{"append_ckv", &append_ckv}, std::pair{"append_kpe", &append_kpe}}) {
    if (t->size(1) == 0) FLASHINFER_THROW(ArgumentError) << op << ": " << name << ".shape[1] must be at least 1, got 0";
  }
  const CacheView ckv = LatentView(op, "ckv_cache", ckv_cache, append_ckv, "append_ckv");
  const CacheView kpe = LatentView(op, "kpe_cache", kpe_cache, append_kpe, "append_kpe");
  Expect(op, "kpe_cache", kpe_cache)
      .dim(0, ckv.num_pages, "ckv_cache.shape[0]")
      .dim(1, ckv.page_size, "ckv_cache.shape[1]");
  if (ckv.page_size < 1) FailSize(op, "ckv_cache", "tokens per page", 0, 1, "or more");
  AppendParams params{};
  params.table = TableOf(op, indices, append_ckv, ckv.num_pages, ckv.page_size);
  params.num_heads = 1;
  params.key = PartOf(append_ckv, ckv);
  params.value = PartOf(append_kpe, kpe);
  Append(op, append_ckv, params, validate);
  return true;
}

void get_batch_indices_positions(TensorView append_indptr, TensorView seq_lens, TensorView batch_indices,
                                 TensorView positions) {
  const char* op = "get_batch_indices_positions";
  Expect(op, "append_indptr", append_indptr).on_device().dtype({dl_int32}).rank(1).contiguous();
  for (auto [name, t] : {std::pair{"seq_lens", &seq_lens}, std::pair{"batch_indices", &batch_indices},
                         std::pair{"positions", &positions}}) {
    Expect(op, name, *t).same_device(append_indptr, "append_indptr").dtype({dl_int32}).rank(1).contiguous();
  }
  Expect(op, "append_indptr", append_indptr).dim(0, seq_lens.size(0) + 1, "one more than seq_lens has");
  Expect(op, "positions", positions).dim(0, batch_indices.size(0), "batch_indices.shape[0]");
  BatchIndicesParams p{};
  p.append_indptr = append_indptr.data_ptr<int32_t>();
  p.seq_lens = seq_lens.data_ptr<int32_t>();
  p.batch_indices = batch_indices.data_ptr<int32_t>();
  p.positions = positions.data_ptr<int32_t>();
  p.batch_size = seq_lens.size(0);
  p.num_rows = batch_indices.size(0);
#ifdef FLASHINFER_CPU
  CheckRising(op, "append_indptr", p.append_indptr, p.batch_size);
#endif
  DeviceGuard guard(append_indptr.device());
  CheckStatus(op, flashinfer::BatchIndicesPositions(p, get_stream(append_indptr.device())));
}
