// SPDX-License-Identifier: Apache-2.0
// Launchers of the rotary embedding: argument checks, dtype dispatch, stream.
#include <cmath>
#include <tuple>

#include "rope_arguments.h"

using flashinfer::RopeOut;
using flashinfer::RopeParams;
using flashinfer::RopeSegment;
using flashinfer::page::TableOf;
using flashinfer::page::Validate;
using namespace flashinfer::rope;  // NOLINT(build/namespaces)

namespace {

// ---------------------------------------------------------------------------------------------- rotation alone

struct Frequencies {
  double scale, theta, ramp = 0, shift = 0;
};

Frequencies Llama31(double scale, double theta, double low, double high, double old_context_len) {
  constexpr double TURN = 6.283185307179586;
  return {scale, theta, old_context_len / (TURN * (high - low)), -1 / (high / low - 1)};
}

/// Return the output, or the input if `out` is None. (Passing None is 0.1 us per tensor cheaper than passing the input
/// twice.)
TensorView OutputOf(const TensorView& in, const Optional<TensorView>& out) {
  return out.has_value() ? out.value() : in;
}

/// Make the parameters for rotating q and k by angles computed from positions.
RopeParams PairOfHeads(const char* op, const TensorView& q, const TensorView& k, const Optional<TensorView>& q_out,
                       const Optional<TensorView>& k_out, Optional<int64_t> rotary_dim, bool interleave,
                       const Frequencies& f) {
  const TensorView q_rope = OutputOf(q, q_out), k_rope = OutputOf(k, k_out);
  Expect(op, "q", q).on_device().rank(3).dtype({dl_float16, dl_bfloat16, dl_float32}).last_dim_contiguous();
  ExpectHeads(op, "k", k, q, 3, 3);
  Expect(op, "k", k).dim(2, q.size(2), "q.shape[2]");
  ExpectHeads(op, "q_rope", q_rope, q, 3, 3);
  ExpectHeads(op, "k_rope", k_rope, q, 3, 3);
  Expect(op, q_out.has_value() ? "q_rope" : "q", q_rope).same_shape(q, "q").distinct().apart(k, "k");
  Expect(op, k_out.has_value() ? "k_rope" : "k", k_rope).same_shape(k, "k").distinct();
  RopeParams p{};
  p.tokens = q.size(0);
  p.interleave = interleave;
  SetRotaryDim(op, "rotary_dim", p, rotary_dim.value_or(q.size(2)), q.size(2));
  if (!(f.theta > 0) || f.scale == 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": rope_theta must be positive and rope_scale not 0, got " << f.theta
                                    << " and " << f.scale;
  }
  if (!std::isfinite(f.ramp) || !std::isfinite(f.shift)) {
    FLASHINFER_THROW(ArgumentError) << op << ": low_freq_factor and high_freq_factor must differ, got equal numbers";
  }
  p.angles.log2_step = 2 * std::log2(f.theta) / double(p.rotary_dim);
  p.angles.inv_scale = 1 / f.scale;
  p.angles.ramp = f.ramp;
  p.angles.shift = f.shift;
  AddSegment(p, SegmentOf(q, q_rope, true));
  AddSegment(p, SegmentOf(k, k_rope, true));
  p.enable_pdl = UsePdl(true, q.device());
  return p;
}

// ---------------------------------------------------------------------------------------------- with quantisation

struct Scales {
  double q, kv;
};

/// Validate the inputs and the outputs for q of both quantising forms, and make segments of them.
RopeParams QuantizeQuery(const char* op, const TensorView& q_rope, const TensorView& k_rope,
                         const Optional<TensorView>& q_nope, const Optional<TensorView>& k_nope,
                         const TensorView& q_rope_out, const TensorView& q_nope_out, const TensorView& cos_sin_cache,
                         const TensorView& pos_ids, bool interleave) {
  Expect(op, "q_rope", q_rope).on_device().rank(3).dtype({dl_float16, dl_bfloat16, dl_float32}).last_dim_contiguous();
  ExpectHeads(op, "k_rope", k_rope, q_rope, 2, 3);
  Expect(op, "k_rope", k_rope).dim(-1, q_rope.size(2), "q_rope.shape[2]");
  if (q_nope.has_value()) {
    ExpectHeads(op, "q_nope", q_nope.value(), q_rope, 3, 3);
    Expect(op, "q_nope", q_nope.value()).dim(1, q_rope.size(1), "q_rope.shape[1]");
    Expect(op, "q_nope_out", q_nope_out).same_shape(q_nope.value(), "q_nope");
  } else {
    Expect(op, "q_nope_out", q_nope_out).dim(-1, 0, "q_nope is None");
  }
  if (k_nope.has_value()) {
    ExpectHeads(op, "k_nope", k_nope.value(), q_rope, k_rope.ndim(), k_rope.ndim());
    if (k_rope.ndim() == 3) Expect(op, "k_nope", k_nope.value()).dim(1, k_rope.size(1), "k_rope.shape[1]");
  }
  Expect(op, "q_rope_out", q_rope_out)
      .same_device(q_rope, "q_rope")
      .dtype({dl_float8_e4m3fn, dl_float8_e5m2})
      .same_shape(q_rope, "q_rope")
      .last_dim_contiguous()
      .distinct();
  Expect(op, "q_nope_out", q_nope_out)
      .same_device(q_rope, "q_rope")
      .same_dtype(q_rope_out, "q_rope_out")
      .last_dim_contiguous()
      .distinct()
      .apart(q_rope, "q_rope")
      .apart(q_rope_out, "q_rope_out")
      .apart(q_nope, "q_nope");
  Expect(op, "q_rope_out", q_rope_out).apart(q_rope, "q_rope").apart(q_nope, "q_nope");
  RopeParams p{};
  p.tokens = q_rope.size(0);
  p.interleave = interleave;
  p.out_kind = q_rope_out.dtype().code == kDLFloat8_e4m3fn ? RopeOut::kE4M3 : RopeOut::kE5M2;
  SetPosIds(op, "pos_ids", p, pos_ids, q_rope);
  SetCache(op, p, cos_sin_cache, q_rope, q_rope.size(2));
  Expect(op, "cos_sin_cache", cos_sin_cache).dim(1, q_rope.size(2), "q_rope.shape[2]");
  return p;
}

/// Make the segment that writes a tensor of keys or values into a cache. `column`: first column in the entry of a head.
RopeSegment CacheSegment(const TensorView& in, const TensorView& cache, int64_t column, bool heads_first, bool rotated,
                         double scale) {
  const int entry_dim = cache.ndim() == 4 && heads_first ? 2 : 1;
  RopeSegment s = SegmentOf(in, in, rotated, scale);
  s.out = cache.data_ptr<char>() + column;
  s.paged = true;
  s.out_row = StrideOf(cache, 0);
  s.out_entry = StrideOf(cache, entry_dim);
  s.out_head = cache.ndim() == 4 ? StrideOf(cache, 3 - entry_dim) : 0;
  return s;
}

}  // namespace

void apply_rope(TensorView q, TensorView k, Optional<TensorView> q_rope, Optional<TensorView> k_rope, TensorView indptr,
                TensorView offsets, Optional<int64_t> rotary_dim, bool interleave, double rope_scale,
                double rope_theta) {
  const char* op = "apply_rope";
  RopeParams p = PairOfHeads(op, q, k, q_rope, k_rope, rotary_dim, interleave, {rope_scale, rope_theta});
  SetRagged(op, p, indptr, offsets, q);
  Run(op, p, q);
}

void apply_rope_pos_ids(TensorView q, TensorView k, Optional<TensorView> q_rope, Optional<TensorView> k_rope,
                        TensorView pos_ids, Optional<int64_t> rotary_dim, bool interleave, double rope_scale,
                        double rope_theta) {
  const char* op = "apply_rope_pos_ids";
  RopeParams p = PairOfHeads(op, q, k, q_rope, k_rope, rotary_dim, interleave, {rope_scale, rope_theta});
  SetPosIds(op, "pos_ids", p, pos_ids, q);
  Run(op, p, q);
}

void apply_llama31_rope(TensorView q, TensorView k, Optional<TensorView> q_rope, Optional<TensorView> k_rope,
                        TensorView indptr, TensorView offsets, Optional<int64_t> rotary_dim, bool interleave,
                        double rope_scale, double rope_theta, double low_freq_factor, double high_freq_factor,
                        double old_context_len) {
  const char* op = "apply_llama31_rope";
  const Frequencies f = Llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len);
  RopeParams p = PairOfHeads(op, q, k, q_rope, k_rope, rotary_dim, interleave, f);
  SetRagged(op, p, indptr, offsets, q);
  Run(op, p, q);
}

void apply_llama31_rope_pos_ids(TensorView q, TensorView k, Optional<TensorView> q_rope, Optional<TensorView> k_rope,
                                TensorView pos_ids, Optional<int64_t> rotary_dim, bool interleave, double rope_scale,
                                double rope_theta, double low_freq_factor, double high_freq_factor,
                                double old_context_len) {
  const char* op = "apply_llama31_rope_pos_ids";
  const Frequencies f = Llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len);
  RopeParams p = PairOfHeads(op, q, k, q_rope, k_rope, rotary_dim, interleave, f);
  SetPosIds(op, "pos_ids", p, pos_ids, q);
  Run(op, p, q);
}

void apply_rope_pos_ids_cos_sin_cache(TensorView query, TensorView key, Optional<TensorView> query_out,
                                      Optional<TensorView> key_out, int64_t head_size, TensorView cos_sin_cache,
                                      TensorView positions, bool interleave) {
  const char* op = "apply_rope_with_cos_sin_cache";
  const TensorView q_out = OutputOf(query, query_out), k_out = OutputOf(key, key_out);
  Expect(op, "query", query).on_device().rank(2, 3).dtype({dl_float16, dl_bfloat16, dl_float32}).last_dim_contiguous();
  ExpectHeads(op, "key", key, query, 2, 3);
  Expect(op, query_out.has_value() ? "query_out" : "query", q_out)
      .same_shape(query, "query")
      .distinct()
      .apart(key, "key");
  Expect(op, key_out.has_value() ? "key_out" : "key", k_out).same_shape(key, "key").distinct();
  for (auto [name, out] : {std::pair{"query_out", &q_out}, std::pair{"key_out", &k_out}}) {
    Expect(op, name, *out).same_device(query, "query").same_dtype(query, "query").last_dim_contiguous();
  }
  if (head_size < 1) FLASHINFER_THROW(ArgumentError) << op << ": head_size must be at least 1, got " << head_size;
  RopeParams p{};
  p.tokens = query.size(0);
  p.interleave = interleave;
  SetPosIds(op, "positions", p, positions, query);
  SetCache(op, p, cos_sin_cache, query, head_size);
  p.enable_pdl = UsePdl(true, query.device());
  for (auto [name, in, out] : {std::tuple{"query", &query, &q_out}, std::tuple{"key", &key, &k_out}}) {
    RopeSegment segment = SegmentOf(*in, *out, true);
    if (segment.width % head_size != 0 || (in->ndim() == 3 && segment.width != head_size)) {
      FLASHINFER_THROW(ArgumentError) << op << ": " << name << ".shape[-1] must be "
                                      << (in->ndim() == 3 ? "" : "a multiple of ") << head_size << " (head_size), got "
                                      << segment.width;
    }
    if (in->ndim() == 2) {  // the heads lie side by side
      segment.heads = segment.width / head_size;
      segment.in_head = segment.out_head = head_size;
      segment.width = head_size;
    }
    AddSegment(p, segment);
  }
  CheckTableRows(op, p);
  Run(op, p, query);
}

void rope_quantize(TensorView q_rope, TensorView k_rope, Optional<TensorView> q_nope, Optional<TensorView> k_nope,
                   TensorView q_rope_out, TensorView k_rope_out, TensorView q_nope_out, TensorView k_nope_out,
                   TensorView cos_sin_cache, TensorView pos_ids, double quant_scale_q, double quant_scale_kv,
                   bool interleave, bool enable_pdl) {
  const char* op = "rope_quantize_fp8";
  RopeParams p =
      QuantizeQuery(op, q_rope, k_rope, q_nope, k_nope, q_rope_out, q_nope_out, cos_sin_cache, pos_ids, interleave);
  for (auto [name, out] : {std::pair{"k_rope_out", &k_rope_out}, std::pair{"k_nope_out", &k_nope_out}}) {
    Expect(op, name, *out)
        .same_device(q_rope, "q_rope")
        .same_dtype(q_rope_out, "q_rope_out")
        .last_dim_contiguous()
        .distinct()
        .apart(k_rope, "k_rope")
        .apart(k_nope, "k_nope");
  }
  Expect(op, "k_rope_out", k_rope_out).same_shape(k_rope, "k_rope");
  if (k_nope.has_value()) {
    Expect(op, "k_nope_out", k_nope_out).same_shape(k_nope.value(), "k_nope");
  } else {
    Expect(op, "k_nope_out", k_nope_out).dim(-1, 0, "k_nope is None");
  }
  p.enable_pdl = UsePdl(enable_pdl, q_rope.device());
  AddSegment(p, SegmentOf(q_rope, q_rope_out, true, quant_scale_q));
  AddSegment(p, SegmentOf(k_rope, k_rope_out, true, quant_scale_kv));
  if (q_nope.has_value()) AddSegment(p, SegmentOf(q_nope.value(), q_nope_out, false, quant_scale_q));
  if (k_nope.has_value()) AddSegment(p, SegmentOf(k_nope.value(), k_nope_out, false, quant_scale_kv));
  CheckTableRows(op, p);
  Run(op, p, q_rope);
}

void rope_quantize_append_paged_kv_cache(TensorView q_rope, TensorView k_rope, Optional<TensorView> q_nope,
                                         Optional<TensorView> k_nope, Optional<TensorView> v, TensorView q_rope_out,
                                         TensorView q_nope_out, TensorView first_cache, TensorView second_cache,
                                         TensorView cos_sin_cache, TensorView pos_ids, TensorView kv_indices,
                                         TensorView kv_indptr, TensorView batch_indices, TensorView positions,
                                         int64_t page_size, bool heads_first, double quant_scale_q,
                                         double quant_scale_kv, bool interleave, bool enable_pdl, bool validate) {
  const char* op = "rope_quantize_fp8_append_paged_kv_cache";
  RopeParams p =
      QuantizeQuery(op, q_rope, k_rope, q_nope, k_nope, q_rope_out, q_nope_out, cos_sin_cache, pos_ids, interleave);
  p.enable_pdl = UsePdl(enable_pdl, q_rope.device());
  const bool mla = k_rope.ndim() == 2;
  const int64_t rope_dim = k_rope.size(-1), nope_dim = k_nope.has_value() ? k_nope.value().size(-1) : 0;
  const int page_dim = !mla && heads_first ? 2 : 1;
  for (auto [name, cache, width, because] :
       {std::tuple{mla ? "ckv_cache" : "k_cache", &first_cache, mla ? nope_dim : rope_dim + nope_dim,
                   mla ? "the width of k_nope" : "the widths of k_rope and k_nope"},
        std::tuple{mla ? "kpe_cache" : "v_cache", &second_cache, mla ? rope_dim : v.value().size(-1),
                   mla ? "the width of k_rope" : "the width of v"}}) {
    Expect(op, name, *cache)
        .same_device(q_rope, "q_rope")
        .same_dtype(q_rope_out, "q_rope_out")
        .rank(mla ? 3 : 4)
        .dim(page_dim, page_size, "page_size")
        .dim(-1, width, because)
        .last_dim_contiguous()
        .distinct();
    if (!mla) Expect(op, name, *cache).dim(3 - page_dim, k_rope.size(1), "k_rope.shape[1]");
    Expect(op, name, *cache).dim(0, first_cache.size(0), "the pages of the first cache");
  }
  if (page_size < 1) FLASHINFER_THROW(ArgumentError) << op << ": page_size must be 1 or more, got " << page_size;
  p.pages = TableOf(op, {batch_indices, positions, kv_indices, kv_indptr}, q_rope, first_cache.size(0), page_size);

  const TensorView& rope_cache = mla ? second_cache : first_cache;
  AddSegment(p, SegmentOf(q_rope, q_rope_out, true, quant_scale_q));
  AddSegment(p, CacheSegment(k_rope, rope_cache, 0, heads_first, true, quant_scale_kv));
  if (q_nope.has_value()) AddSegment(p, SegmentOf(q_nope.value(), q_nope_out, false, quant_scale_q));
  if (k_nope.has_value()) {
    AddSegment(p, CacheSegment(k_nope.value(), first_cache, mla ? 0 : rope_dim, heads_first, false, quant_scale_kv));
  }
  if (!mla) {
    ExpectHeads(op, "v", v.value(), q_rope, 3, 3);
    Expect(op, "v", v.value()).dim(1, k_rope.size(1), "k_rope.shape[1]");
    AddSegment(p, CacheSegment(v.value(), second_cache, 0, heads_first, false, quant_scale_kv));
  }
  {
    DeviceGuard guard(q_rope.device());
    Validate(op, p.pages, validate, get_stream(q_rope.device()));
  }
  CheckTableRows(op, p);
  Run(op, p, q_rope);
}
