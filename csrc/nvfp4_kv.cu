// SPDX-License-Identifier: Apache-2.0
// Launchers of the NVFP4 dequantisation: argument checks, dtype dispatch, stream.
#include <algorithm>

#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/nvfp4_kv.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/nvfp4_kv_cpu.h>
#elif defined(__CUDACC__)
#include <flashinfer/nvfp4_kv.cuh>
#endif
// clang-format on

using flashinfer::Nvfp4Pages;
using flashinfer::PageStride;

namespace {

constexpr int BLOCK = 16;  // elements that share a scale

template <typename F>
void DispatchHalf(DLDataType dtype, F&& f) {
  if (dtype.code == kDLBfloat) return f(TypeTag<flashinfer::bfloat16_t>{});
  return f(TypeTag<flashinfer::float16_t>{});
}

/// Axes of a cache (pages, page_size, heads, dim), or with heads before page_size; of an output (batch, seq, heads,
/// dim).
struct Axes {
  int token, head;
};

PageStride StrideOf(const TensorView& t, Axes axes) { return {t.stride(0), t.stride(axes.token), t.stride(axes.head)}; }

/// One half of the arguments: names in the order cache, scales, output.
struct Part {
  const char *data_name, *scales_name, *out_name;
  const TensorView &data, &scales, &scale, &out;
};

void CheckPart(const char* op, const Part& part, const TensorView& data, const TensorView& out, Axes axes) {
  Expect(op, part.data_name, part.data)
      .same_device(data, "the key cache")
      .dtype({dl_uint8})
      .rank(4)
      .last_dim_contiguous();
  Expect(op, part.scales_name, part.scales)
      .same_device(data, "the key cache")
      .dtype({dl_float8_e4m3fn, dl_uint8})
      .rank(4)
      .last_dim_contiguous()
      .dim(0, part.data.size(0), "pages of the cache")
      .dim(1, part.data.size(1), "the shape of the cache")
      .dim(2, part.data.size(2), "the shape of the cache");
  Expect(op, part.out_name, part.out)
      .same_device(data, "the key cache")
      .same_dtype(out, "output_k")
      .dtype({dl_float16, dl_bfloat16})
      .rank(4)
      .last_dim_contiguous()
      .distinct()
      .dim(0, out.size(0), "output_k.shape[0]")
      .dim(1, out.size(1), "output_k.shape[1]")
      .dim(2, part.data.size(axes.head), "heads of the cache")
      .dim(3, part.data.size(3) * 2, "two elements for a byte of the cache");
  if (part.out.size(3) % BLOCK != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << part.out_name << ".shape[3] must be a multiple of " << BLOCK
                                    << " (elements that share a scale), got " << part.out.size(3);
  }
  Expect(op, part.scales_name, part.scales).dim(3, part.out.size(3) / BLOCK, "one scale for 16 elements");
}

template <typename T>
Nvfp4Pages<T> PagesOf(const Part& part, Axes axes) {
  return {part.data.data_ptr<uint8_t>(),
          part.scales.data_ptr<uint8_t>(),
          part.scale.data_ptr<float>(),
          part.out.data_ptr<T>(),
          StrideOf(part.data, axes),
          StrideOf(part.scales, axes),
          StrideOf(part.out, {1, 2}),
          part.out.size(3),
          part.data.size(0)};
}

#ifdef FLASHINFER_CPU  // CUDA kernels skip tokens of invalid pages: a check here would have to synchronise
template <typename T, typename IdType>
void CheckPages(const char* op, const flashinfer::Nvfp4PagedParams<T, IdType>& p) {
  int64_t num_pages = INT64_MAX;
  for (const Nvfp4Pages<T>& part : p.parts)
    num_pages = part.head_dim == 0 ? num_pages : std::min(num_pages, part.num_pages);
  for (int64_t request = 0; request < p.batch_size; ++request) {
    const int64_t tokens = std::min<int64_t>(p.seq_lens[request], p.max_seq_len);
    for (int64_t i = 0; i * p.page_size < tokens; ++i) {
      const int64_t page = p.block_tables[request * p.table_stride + i];
      if (page >= 0 && page < num_pages) continue;
      FLASHINFER_THROW(ArgumentError) << op << ": block_tables[" << request << ", " << i
                                      << "] must be a page of the cache, which has " << num_pages << ", got " << page;
    }
  }
}
#endif

}  // namespace

void nvfp4_kv_dequantize(TensorView out, TensorView fp4_data, TensorView block_scales, TensorView global_scale) {
  const char* op = "nvfp4_kv_dequantize";
  Expect(op, "fp4_data", fp4_data).on_device().dtype({dl_uint8}).rank(2).contiguous();
  const int64_t rows = fp4_data.size(0), cols = fp4_data.size(1) * 2;
  if (cols % BLOCK != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": fp4_data.shape[1] must be a multiple of " << BLOCK
                                    << " (elements that share a scale), got " << cols / 2 << ", so K = " << cols;
  }
  Expect(op, "block_scales", block_scales)
      .same_device(fp4_data, "fp4_data")
      .dtype({dl_float8_e4m3fn, dl_uint8})
      .rank(2)
      .contiguous()
      .dim(0, rows, "fp4_data.shape[0]")
      .dim(1, cols / BLOCK, "one scale for 16 elements");
  Expect(op, "global_scale", global_scale).same_device(fp4_data, "fp4_data").dtype({dl_float32}).numel(1);
  Expect(op, "out", out)
      .same_device(fp4_data, "fp4_data")
      .dtype({dl_float16, dl_bfloat16})
      .contiguous()
      .numel(rows * cols);
  DeviceGuard guard(fp4_data.device());
  DispatchHalf(out.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const flashinfer::Nvfp4DequantizeParams<T> p{fp4_data.data_ptr<uint8_t>(), block_scales.data_ptr<uint8_t>(),
                                                 global_scale.data_ptr<float>(), out.data_ptr<T>(), rows * cols};
    CheckStatus(op, flashinfer::Nvfp4Dequantize<T>(p, get_stream(fp4_data.device())));
  });
}

void nvfp4_kv_dequantize_paged(TensorView k_cache, TensorView v_cache, TensorView k_sf, TensorView v_sf,
                               TensorView block_tables, TensorView seq_lens, TensorView k_scale, TensorView v_scale,
                               TensorView output_k, TensorView output_v, bool is_hnd) {
  const char* op = "nvfp4_kv_dequantize_paged";
  const Axes axes = is_hnd ? Axes{2, 1} : Axes{1, 2};
  const Part keys{"k_cache", "k_cache_sf", "output_k", k_cache, k_sf, k_scale, output_k};
  const Part values{"v_cache", "v_cache_sf", "output_v", v_cache, v_sf, v_scale, output_v};
  Expect(op, "k_cache", k_cache).on_device();
  CheckPart(op, keys, k_cache, output_k, axes);
  CheckPart(op, values, k_cache, output_k, axes);
  Expect(op, "v_cache", v_cache).dim(axes.token, k_cache.size(axes.token), "page size of the key cache");
  Expect(op, "v_cache", v_cache).dim(axes.head, k_cache.size(axes.head), "heads of the key cache");
  Expect(op, "k_scale", k_scale).same_device(k_cache, "the key cache").dtype({dl_float32}).numel(1);
  Expect(op, "v_scale", v_scale).same_device(k_cache, "the key cache").dtype({dl_float32}).numel(1);
  const int64_t batch_size = output_k.size(0), max_seq_len = output_k.size(1), page_size = k_cache.size(axes.token);
  Expect(op, "block_tables", block_tables)
      .same_device(k_cache, "the key cache")
      .dtype({dl_int32, dl_int64})
      .rank(2)
      .last_dim_contiguous()
      .dim(0, batch_size, "output_k.shape[0]");
  Expect(op, "seq_lens", seq_lens)
      .same_device(k_cache, "the key cache")
      .dtype({dl_int32})
      .rank(1)
      .contiguous()
      .dim(0, batch_size, "output_k.shape[0]");
  if (output_k.numel() == 0 && output_v.numel() == 0) return;
  if (block_tables.size(1) * page_size < max_seq_len) {
    FLASHINFER_THROW(ArgumentError) << op << ": block_tables column count insufficient: pages of " << page_size
                                    << " tokens must hold output_k.shape[1] = " << max_seq_len << ", got "
                                    << block_tables.size(1) << " pages";
  }
  DeviceGuard guard(k_cache.device());
  DispatchHalf(output_k.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    auto run = [&](auto index_tag) {
      using IdType = typename decltype(index_tag)::type;
      const flashinfer::Nvfp4PagedParams<T, IdType> p{{PagesOf<T>(keys, axes), PagesOf<T>(values, axes)},
                                                      block_tables.data_ptr<IdType>(),
                                                      block_tables.stride(0),
                                                      seq_lens.data_ptr<int32_t>(),
                                                      batch_size,
                                                      max_seq_len,
                                                      output_k.size(2),
                                                      page_size};
#ifdef FLASHINFER_CPU
      CheckPages(op, p);
#endif
      CheckStatus(op, flashinfer::Nvfp4DequantizePaged<T, IdType>(p, get_stream(k_cache.device())));
    };
    if (block_tables.dtype().bits == 64) return run(TypeTag<int64_t>{});
    return run(TypeTag<int32_t>{});
  });
}
