// SPDX-License-Identifier: Apache-2.0
// Launcher of sparse MLA, for the CPU and for CUDA. A CPU module serves all forms of queries and caches, a CUDA module one:
// SPARSE_MLA_FORMS of its config lists them.
#include "sparse_mla_config.inc"
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/attention/common/math.h>
#include <flashinfer/attention/sparse_mla/params.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/attention/sparse_mla/cpu.h>
#endif
// clang-format on

using namespace flashinfer;
using sparse_mla::Cache;

namespace {

constexpr const char* OP = "sparse_mla";

Cache CacheOf(const TensorView& q, const TensorView& kv) {
  if (encode_dlpack_dtype(kv.dtype()) == encode_dlpack_dtype(q.dtype())) return Cache::kLikeQuery;
  Expect(OP, "kv_cache", kv).dtype({q.dtype(), dl_float8_e4m3fn, dl_uint8});
  Expect(OP, "q", q).dtype({dl_bfloat16});  // what caches of 8 bits are converted to
  return encode_dlpack_dtype(kv.dtype()) == encode_dlpack_dtype(dl_uint8) ? Cache::kPacked : Cache::kE4m3;
}

void SetQueries(SparseMlaParams& p, const TensorView& q, const TensorView& out) {
  Expect(OP, "q", q).on_device().rank(3).dtype({dl_bfloat16, dl_float16, dl_float32}).last_dim_contiguous();
  if (q.size(2) != sparse_mla::D_V && q.size(2) != sparse_mla::D_V + sparse_mla::D_ROPE) {
    FLASHINFER_THROW(ArgumentError) << OP << ": q.shape[2] must be 512 or 576 (512 + 64 rotary columns), got "
                                    << q.size(2);
  }
  Expect(OP, "out", out).same_device(q, "q").same_dtype(q, "q").rank(3).dim(0, q.size(0), "q.shape[0]");
  Expect(OP, "out", out).dim(1, q.size(1), "q.shape[1]").dim(2, sparse_mla::D_V, "columns of a value").contiguous();
  Expect(OP, "out", out).apart(q, "q");
  p.q = q.data_ptr(), p.out = out.data_ptr();
  p.q_stride_n = q.stride(0), p.q_stride_h = q.stride(1);
  p.tokens = int32_t(q.size(0)), p.heads = int32_t(q.size(1));
}

void SetCache(SparseMlaParams& p, const TensorView& q, const TensorView& kv, Cache cache) {
  Expect(OP, "kv_cache", kv).same_device(q, "q").rank(3).last_dim_contiguous();
  if (cache == Cache::kPacked) {
    Expect(OP, "kv_cache", kv).dim(2, sparse_mla::PACKED_BYTES, "512 e4m3, 4 float32, 64 bfloat16");
    Expect(OP, "q", q).dim(2, sparse_mla::D_V + sparse_mla::D_ROPE, "rows of 656 bytes have rotary columns");
  } else {
    Expect(OP, "kv_cache", kv).dim(2, q.size(2), "q.shape[2]");
  }
  const int64_t bytes = kv.dtype().bits / 8;
  p.kv = kv.data_ptr();
  p.kv_stride_page = kv.stride(0) * bytes, p.kv_stride_slot = kv.stride(1) * bytes;
  p.rows = kv.size(0) * kv.size(1);
  p.page_size = FastDivisor(uint32_t(kv.size(1) > 0 ? kv.size(1) : 1));
  const auto aligned = [](int64_t x) { return x % 16 == 0; };
  const bool is_aligned = aligned(int64_t(reinterpret_cast<uintptr_t>(p.kv))) &&
                          (kv.size(0) < 2 || aligned(p.kv_stride_page)) &&
                          (kv.size(1) < 2 || aligned(p.kv_stride_slot));
  if (p.rows > 0 && !is_aligned) {
    FLASHINFER_THROW(ArgumentError) << OP << ": kv_cache must have rows at multiples of 16 bytes, got strides of "
                                    << p.kv_stride_page << " and " << p.kv_stride_slot << " bytes";
  }
}

void SetIndices(SparseMlaParams& p, const TensorView& q, const TensorView& indices,
                const Optional<TensorView>& lengths) {
  Expect(OP, "indices", indices).same_device(q, "q").dtype({dl_int32}).rank(2).dim(0, q.size(0), "q.shape[0]");
  Expect(OP, "indices", indices).last_dim_contiguous();
  p.indices = indices.data_ptr<int32_t>();
  p.indices_stride = indices.stride(0), p.top_k = int32_t(indices.size(1));
  if (!lengths.has_value()) return;
  const TensorView& counts = *lengths;
  Expect(OP, "lengths", counts).same_device(q, "q").dtype({dl_int32}).rank(1).dim(0, q.size(0), "q.shape[0]");
  Expect(OP, "lengths", counts).contiguous();
  p.lengths = counts.data_ptr<int32_t>();
}

#ifdef FLASHINFER_CPU  // CUDA kernels leave out what lies outside: a check would have to wait for the device
void CheckValues(const SparseMlaParams& p) {
  for (int32_t t = 0; t < p.tokens; ++t) {
    if (p.lengths != nullptr && (p.lengths[t] < 0 || p.lengths[t] > p.top_k)) {
      FLASHINFER_THROW(ArgumentError) << OP << ": lengths[" << t << "] must be 0 to " << p.top_k
                                      << " (indices.shape[1]), got " << p.lengths[t];
    }
    for (int32_t j = 0, n = sparse_mla::LengthOf(p, t); j < n; ++j) {
      const int32_t row = p.indices[t * p.indices_stride + j];
      if (row >= -1 && row < p.rows) continue;
      FLASHINFER_THROW(ArgumentError) << OP << ": indices[" << t << ", " << j << "] must be -1 (none) to " << p.rows - 1
                                      << " (rows of kv_cache), got " << row;
    }
  }
}
#endif

Status Run(const SparseMlaParams& p, DLDataType q, Cache cache, bool has_rope, Stream stream) {
#define FORM(T, DTYPE, CACHE, ROPE)                                                                 \
  if (encode_dlpack_dtype(q) == encode_dlpack_dtype(DTYPE) && cache == CACHE && has_rope == ROPE) { \
    return SparseMla<T, CACHE, ROPE>(p, stream);                                                    \
  }
  SPARSE_MLA_FORMS(FORM)
#undef FORM
  FLASHINFER_THROW(ArgumentError) << OP << ": q must be bfloat16 or float16 on this device, got " << q;
}

}  // namespace

/// Attend to the rows that `indices` name. `partials` has room for splits * tokens * heads * 513 floats if splits > 1.
void sparse_mla_run(TensorView out, Optional<TensorView> lse, Optional<TensorView> partials, TensorView q,
                    TensorView kv, TensorView indices, Optional<TensorView> lengths, Optional<TensorView> sinks,
                    int64_t splits, double sm_scale, double kv_scale, bool return_lse_base_on_e, bool enable_pdl) {
  SparseMlaParams p{};
  SetQueries(p, q, out);
  const Cache cache = CacheOf(q, kv);
  SetCache(p, q, kv, cache);
  SetIndices(p, q, indices, lengths);
  Expect(OP, "out", out).apart(kv, "kv_cache").apart(indices, "indices").apart(lengths, "lengths");
  Expect(OP, "out", out).apart(sinks, "sinks");
  if (lse.has_value()) {
    const TensorView& scores = *lse;
    Expect(OP, "lse", scores).same_device(q, "q").dtype({dl_float32}).rank(2).dim(0, q.size(0), "q.shape[0]");
    Expect(OP, "lse", scores).dim(1, q.size(1), "q.shape[1]").contiguous();
    Expect(OP, "lse", scores).apart(q, "q").apart(kv, "kv_cache").apart(indices, "indices").apart(out, "out");
    Expect(OP, "lse", scores).apart(lengths, "lengths").apart(sinks, "sinks");
    p.lse = scores.data_ptr<float>();
  }
  if (sinks.has_value()) {
    Expect(OP, "sinks", *sinks).same_device(q, "q").dtype({dl_float32}).rank(1).dim(0, q.size(1), "q.shape[1]");
    Expect(OP, "sinks", *sinks).contiguous();
    p.sinks = (*sinks).data_ptr<float>();
  }
  p.splits = int32_t(splits);
  if (splits != 1) {
    const int64_t rows = splits * q.size(0) * q.size(1);
    if (splits < 1 || !partials.has_value()) {
      FLASHINFER_THROW(ArgumentError) << OP << ": splits must be 1 without partials, got " << splits;
    }
    Expect(OP, "partials", *partials).same_device(q, "q").dtype({dl_float32}).contiguous();
    Expect(OP, "partials", *partials).numel(rows * (sparse_mla::D_V + 1));
    p.partial_o = (*partials).data_ptr<float>();
    p.partial_lse = p.partial_o + rows * sparse_mla::D_V;
  }
  p.scale_log2 = float(sm_scale * kv_scale * 1.44269504088896340736);
  p.out_scale = float(kv_scale);
  p.lse_scale = return_lse_base_on_e ? math::loge2 : 1.f;
  p.enable_pdl = UsePdl(enable_pdl, q.device());
  if (p.tokens == 0 || p.heads == 0) return;
#ifdef FLASHINFER_CPU
  CheckValues(p);
#endif
  const DeviceGuard guard(q.device());
  CheckStatus(OP, Run(p, q.dtype(), cache, q.size(2) != sparse_mla::D_V, get_stream(q.device())));
}
