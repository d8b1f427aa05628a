// SPDX-License-Identifier: Apache-2.0
// Launchers of the NVFP4 append operators: argument checks, forms of the caches, stream.
#include <flashinfer/page_nvfp4.h>

#include "page_arguments.h"
// clang-format off
#if defined(FLASHINFER_CPU)
#include <flashinfer/page_nvfp4_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/page_nvfp4.cuh>
#endif
// clang-format on

using flashinfer::Nvfp4AppendParams;
using flashinfer::Nvfp4Part;
using flashinfer::PageTable;
using flashinfer::SlotMapping;
using namespace flashinfer::page;

namespace {

/// Make a view of one of the four cache tensors: codes or scales, of keys or values.
CacheView View(const char* op, const char* name, const TensorView& t, const TensorView& rows, bool is_hnd, int half,
               bool scales) {
  Expect(op, name, t).same_device(rows, "append_key").dtype({scales ? dl_float8_e4m3fn : dl_uint8});
  return ViewOf(op, name, t, is_hnd, half, scales);
}

/// Codes and scales of the keys (half 0) or the values (half 1).
struct HalfCache {
  CacheView codes, scales;
};

struct CacheTensors {
  const TensorView &codes, &scales;
  const Optional<TensorView>&value_codes, &value_scales;
};

HalfCache HalfOf(const char* op, const CacheTensors& c, const TensorView& rows, bool is_hnd, int half) {
  auto view = [&](const TensorView& one, const Optional<TensorView>& second, bool scales) {
    if (!second.has_value())
      return View(op, scales ? "kv_cache_sf" : "paged_kv_cache", one, rows, is_hnd, half, scales);
    const char* names[2][2] = {{"paged_kv_cache[0]", "paged_kv_cache[1]"}, {"kv_cache_sf[0]", "kv_cache_sf[1]"}};
    const TensorView t = half == 0 ? one : second.value();
    return View(op, names[scales][half], t, rows, is_hnd, -1, scales);
  };
  return {view(c.codes, c.value_codes, false), view(c.scales, c.value_scales, true)};
}

struct GlobalScale {
  double value;
  const Optional<TensorView>& tensor;
};

template <typename T>
Nvfp4Part<T> PartOf(const TensorView& rows, const HalfCache& cache, const GlobalScale& scale) {
  Nvfp4Part<T> part{};
  part.rows = rows.data_ptr<T>();
  part.codes = reinterpret_cast<uint8_t*>(cache.codes.data);
  part.scales = reinterpret_cast<uint8_t*>(cache.scales.data);
  part.row_stride = {rows.stride(0), rows.stride(1)};
  part.codes_stride = cache.codes.stride;
  part.scales_stride = cache.scales.stride;
  part.global_on_device = scale.tensor.has_value() ? TensorView(scale.tensor.value()).data_ptr<float>() : nullptr;
  part.global = static_cast<float>(scale.value);
  return part;
}

/// Run either form of the append. `place` fills in `table` or `mapping` when the number of pages is known.
template <typename Place>
void Append(const char* op, const TensorView& key, const TensorView& value, const CacheTensors& caches,
            const GlobalScale& k_scale, const GlobalScale& v_scale, bool is_hnd, const Place& place) {
  Expect(op, "append_key", key).on_device().dtype({dl_float16, dl_bfloat16});
  ExpectRows(op, "append_key", key, key);
  ExpectRows(op, "append_value", value, key);
  const int64_t head_dim = key.size(2);
  Expect(op, "append_value", value).dim(2, head_dim, "append_key.shape[2]");
  if (head_dim % flashinfer::NVFP4_BLOCK != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": append_key.shape[2] must be a multiple of 16, got " << head_dim;
  }
  for (auto [name, scale] : {std::pair{"k_scale", &k_scale}, std::pair{"v_scale", &v_scale}}) {
    if (scale->tensor.has_value()) {
      const TensorView t = scale->tensor.value();
      Expect(op, name, t).same_device(key, "append_key").dtype({dl_float32}).numel(1);
#ifdef FLASHINFER_CPU
      const float value = *t.data_ptr<float>();
      if (!(value > 0 && value <= std::numeric_limits<float>::max())) {
        FLASHINFER_THROW(ArgumentError) << op << ": " << name
                                        << " must be a positive finite global decode scale (float32), got " << value;
      }
#endif
    }
  }
  const HalfCache k = HalfOf(op, caches, key, is_hnd, 0), v = HalfOf(op, caches, key, is_hnd, 1);
  const int64_t heads = key.size(1);
  ExpectSizes(op, "paged_kv_cache (keys)", k.codes, k.codes, heads, head_dim / 2);
  ExpectSizes(op, "paged_kv_cache (values)", v.codes, k.codes, heads, head_dim / 2);
  ExpectSizes(op, "kv_cache_sf (keys)", k.scales, k.codes, heads, head_dim / flashinfer::NVFP4_BLOCK);
  ExpectSizes(op, "kv_cache_sf (values)", v.scales, k.codes, heads, head_dim / flashinfer::NVFP4_BLOCK);
  DeviceGuard guard(key.device());
  const flashinfer::Stream stream = get_stream(key.device());
  auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    Nvfp4AppendParams<T> params{};
    params.num_heads = heads;
    params.head_dim = head_dim;
    params.key = PartOf<T>(key, k, k_scale);
    params.value = PartOf<T>(value, v, v_scale);
    place(op, k.codes, stream, &params.table, &params.mapping);
    CheckStatus(op, flashinfer::Nvfp4AppendPaged<T>(params, stream));
  };
  if (key.dtype().code == kDLBfloat) {
    run(TypeTag<flashinfer::bfloat16_t>{});
  } else {
    run(TypeTag<flashinfer::float16_t>{});
  }
}

}  // namespace

void nvfp4_quantize_append_paged_kv_cache(TensorView append_key, TensorView append_value, TensorView batch_indices,
                                          TensorView positions, TensorView cache, Optional<TensorView> value_cache,
                                          TensorView sf, Optional<TensorView> value_sf, TensorView kv_indices,
                                          TensorView kv_indptr, double k_scale, double v_scale, bool is_hnd,
                                          bool validate) {
  auto place = [&](const char* op, const CacheView& pages, flashinfer::Stream stream, PageTable* table, SlotMapping*) {
    *table =
        TableOf(op, {batch_indices, positions, kv_indices, kv_indptr}, append_key, pages.num_pages, pages.page_size);
    Validate(op, *table, validate, stream);
  };
  Append("nvfp4_quantize_append_paged_kv_cache", append_key, append_value, {cache, sf, value_cache, value_sf},
         {k_scale, {}}, {v_scale, {}}, is_hnd, place);
}

void nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(TensorView append_key, TensorView append_value,
                                                            TensorView slot_mapping, TensorView cache,
                                                            Optional<TensorView> value_cache, TensorView sf,
                                                            Optional<TensorView> value_sf, double k_scale,
                                                            double v_scale, Optional<TensorView> k_scale_tensor,
                                                            Optional<TensorView> v_scale_tensor, bool is_hnd) {
  auto place = [&](const char* op, const CacheView& pages, flashinfer::Stream, PageTable* table, SlotMapping* mapping) {
    Expect(op, "slot_mapping", slot_mapping)
        .same_device(append_key, "append_key")
        .dtype({dl_int32, dl_int64})
        .rank(1)
        .contiguous();
    if (append_key.size(0) < slot_mapping.size(0)) {
      FLASHINFER_THROW(ArgumentError) << op << ": append_key.shape[0] must be at least " << slot_mapping.size(0)
                                      << " (slot_mapping.shape[0]), got " << append_key.size(0);
    }
    const int64_t num_slots = pages.num_pages * pages.page_size;
    if (num_slots > std::numeric_limits<int32_t>::max()) {
      FLASHINFER_THROW(ArgumentError) << op << ": paged_kv_cache must have fewer than 2^31 slots, got " << num_slots;
    }
    table->num_rows = slot_mapping.size(0);
    *mapping = {slot_mapping.data_ptr(), slot_mapping.dtype().bits == 64, num_slots, pages.page_size};
  };
  Append("nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", append_key, append_value,
         {cache, sf, value_cache, value_sf}, {k_scale, k_scale_tensor}, {v_scale, v_scale_tensor}, is_hnd, place);
}
