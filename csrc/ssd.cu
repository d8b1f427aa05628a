// SPDX-License-Identifier: Apache-2.0
// Launchers of Mamba-2 over whole sequences: argument checks, strided arrays, stream.
#include "recurrent_arguments.h"
// clang-format off
#include <flashinfer/recurrent/ssd.h>
#if defined(FLASHINFER_CPU)
#include <flashinfer/recurrent/cpu/ssd.h>
#elif defined(__CUDACC__)
#include <flashinfer/recurrent/chunk/ssd.cuh>
#endif
// clang-format on

namespace {

using namespace flashinfer;
using namespace flashinfer::recurrent;

constexpr const char* OP = "ssd_combined_fwd";

WeightType TypeOf(const TensorView& t) {
  if (t.dtype().code == kDLBfloat) return WeightType::kBfloat16;
  return t.dtype().bits == 32 ? WeightType::kFloat : WeightType::kHalf;
}

/// Check states (n, heads, dim, dstate), dense inside a row, of one dtype.
SsdStates AsStates(const char* name, const Optional<TensorView>& given, const TensorView& x, int64_t rows,
                   int64_t dstate, const TensorView** first) {
  if (!given.has_value()) return {};
  const TensorView& t = given.value();
  Expect expect(OP, name, t);
  expect.same_device(x, "x").dtype({dl_float32, dl_bfloat16, dl_float16}).rank(4);
  if (rows >= 0) expect.dim(0, rows, "the number of sequences");
  expect.dim(1, x.size(2), "the heads of x")
      .dim(2, x.size(3), "the dim of x")
      .dim(3, dstate, "the dstate of B")
      .last_dim_contiguous();
  if (*first != nullptr) expect.same_dtype(**first, "the other states");
  *first = &t;
  const bool is_dense =
      (t.size(2) <= 1 || t.stride(2) == dstate) && (t.size(1) <= 1 || t.stride(1) == dstate * t.size(2));
  if (!is_dense) {
    FLASHINFER_THROW(ArgumentError) << OP << ": " << name
                                    << " must be contiguous but for its first dimension, got strides (" << t.stride(0)
                                    << ", " << t.stride(1) << ", " << t.stride(2) << ", " << t.stride(3) << ")";
  }
  return {t.data_ptr(), TypeOf(t), t.stride(0)};
}

IndexArray AsSeqIdx(const char* op, const TensorView& t) {
  Expect(op, "seq_idx", t).dtype({dl_int32, dl_int64}).rank(2).dim(0, 1, "a packed batch");
  return {t.data_ptr(), t.dtype().bits == 64, int(t.size(1)), t.stride(0), t.stride(1)};
}

}  // namespace

void ssd_combined_fwd(TensorView out, Optional<TensorView> final_states, TensorView x, TensorView dt, TensorView a,
                      TensorView b, TensorView c, Optional<TensorView> d, Optional<TensorView> z,
                      Optional<TensorView> dt_bias, Optional<TensorView> initial_states, Optional<TensorView> seq_idx,
                      Optional<TensorView> bounds, Optional<TensorView> kept_tokens, Optional<TensorView> kept_slots,
                      Optional<TensorView> kept_states, bool softplus, double dt_min, double dt_max,
                      int64_t sequences) {
  Expect(OP, "x", x).on_device().dtype({dl_bfloat16, dl_float16}).rank(4).last_dim_contiguous();
  const int64_t heads = x.size(2), dim = x.size(3);
  Expect(OP, "dt", dt)
      .same_device(x, "x")
      .rank(3)
      .dim(0, x.size(0), "that of x")
      .dim(1, x.size(1), "that of x")
      .dim(2, heads, "the heads of x");
  Expect(OP, "A", a).same_device(x, "x").dtype({dl_float32}).rank(1).dim(0, heads, "the heads of x").contiguous();
  Expect(OP, "B", b)
      .same_device(x, "x")
      .same_dtype(x, "x")
      .rank(4)
      .dim(0, x.size(0), "that of x")
      .dim(1, x.size(1), "that of x");
  Expect(OP, "B", b).last_dim_contiguous();
  Expect(OP, "C", c).same_device(x, "x").same_dtype(x, "x").same_shape(b, "B").last_dim_contiguous();
  const int64_t groups = b.size(2), dstate = b.size(3);
  if (groups <= 0 || heads % groups != 0) {
    FLASHINFER_THROW(ArgumentError) << OP << ": B.shape[2] must divide " << heads << " (the heads of x), got "
                                    << groups;
  }
#ifndef FLASHINFER_CPU
  if (dstate > 256 || dstate % 8 != 0) {
    FLASHINFER_THROW(ArgumentError) << OP << ": B.shape[3] must be a multiple of 8, at most 256, got " << dstate;
  }
#endif
  Expect(OP, "out", out).same_device(x, "x").same_dtype(x, "x").same_shape(x, "x").distinct();
  Expect(OP, "out", out).apart(x, "x").apart(dt, "dt").apart(b, "B").apart(c, "C");
  const auto run = [&](auto tag) {
    using Input = typename decltype(tag)::type;
    SsdParams<Input> p{};
    p.x = AsTokens<const Input>(x, false);
    p.b = AsTokens<const Input>(b, false);
    p.c = AsTokens<const Input>(c, false);
    p.out = AsTokens<Input>(out, false);
    p.out_row = out.stride(3);
    if (z.has_value()) {
      Expect(OP, "z", z.value()).same_device(x, "x").same_dtype(x, "x").same_shape(x, "x").last_dim_contiguous();
      p.z = AsTokens<const Input>(z.value(), false);
    }
    Expect(OP, "dt", dt).dtype({dl_float32, dl_bfloat16, dl_float16});
    p.dt = {dt.data_ptr(), TypeOf(dt), dt.stride(0), dt.stride(1), dt.stride(2), 0};
    if (dt_bias.has_value()) {
      const TensorView& t = dt_bias.value();
      Expect(OP, "dt_bias", t)
          .same_device(x, "x")
          .dtype({dl_float32, dl_bfloat16, dl_float16})
          .rank(1)
          .dim(0, heads, "the heads of x");
      p.dt_bias = {t.data_ptr(), TypeOf(t), 0, 0, t.stride(0), 0};
    }
    if (d.has_value()) {
      const TensorView& t = d.value();
      Expect(OP, "D", t)
          .same_device(x, "x")
          .dtype({dl_float32, dl_bfloat16, dl_float16})
          .rank(1, 2)
          .dim(0, heads, "the heads of x");
      if (t.ndim() == 2) Expect(OP, "D", t).dim(1, dim, "the dim of x");
      p.d = {t.data_ptr(), TypeOf(t), 0, 0, t.stride(0), t.ndim() == 2 ? t.stride(1) : 0};
    }
    p.a = a.data_ptr<float>();
    const TensorView* first = nullptr;
    p.initial = AsStates("initial_states", initial_states, x, sequences, dstate, &first);
    p.final = AsStates("final_states", final_states, x, sequences, dstate, &first);
    p.kept = AsStates("checkpoint_states", kept_states, x, -1, dstate, &first);
    if (kept_states.has_value()) {
      p.kept_rows = kept_states.value().size(0);
      p.kept_tokens = AsIndices(OP, "checkpoint_token_indices", kept_tokens, x);
      p.kept_slots = AsIndices(OP, "checkpoint_state_slots", kept_slots, x);
      Expect(OP, "checkpoint_token_indices", kept_tokens.value()).dim(0, sequences, "the number of sequences");
      Expect(OP, "checkpoint_state_slots", kept_slots.value()).dim(0, sequences, "the number of sequences");
    }
    p.sequences = int(sequences);
    p.tokens = int(x.size(1));
    p.heads = int(heads);
    p.heads_per_group = int(heads / groups);
    p.dim = int(dim);
    p.dstate = int(dstate);
    p.dt_min = float(dt_min);
    p.dt_max = float(dt_max);
    p.softplus = softplus;
    DeviceGuard guard(x.device());
    const Stream stream = get_stream(x.device());
    if (seq_idx.has_value()) {
      Expect(OP, "x", x).dim(0, 1, "a packed batch");
      Expect(OP, "seq_idx", seq_idx.value()).same_device(x, "x").rank(2).dim(1, x.size(1), "the tokens of x");
      p.bounds = bounds.value().data_ptr<int32_t>();
      const Status status =
          SsdBounds(AsSeqIdx(OP, seq_idx.value()), bounds.value().data_ptr<int32_t>(), p.tokens, p.sequences, stream);
#ifdef FLASHINFER_CPU
      if (status != 0) {
        FLASHINFER_THROW(ArgumentError) << OP << ": seq_idx must be at least 0 and below " << sequences
                                        << " (the number of sequences)";
      }
#endif
      CheckStatus(OP, status);
    }
    CheckStatus(OP, Ssd(p, stream));
  };
  if (x.dtype().code == kDLBfloat) {
    run(TypeTag<bfloat16_t>{});
  } else {
    run(TypeTag<float16_t>{});
  }
}

void seq_chunk_cumsum(TensorView seq_idx, TensorView chunk_indices, TensorView chunk_offsets, TensorView output,
                      Optional<TensorView> tile_state, int64_t chunk_size, int64_t num_logical_chunks,
                      int64_t num_seqs) {
  const char* op = "seq_chunk_cumsum";
  Expect(op, "seq_idx", seq_idx).on_device();
  const auto indices = [&](const char* name, const TensorView& t) {
    Expect(op, name, t).same_device(seq_idx, "seq_idx").dtype({dl_int32, dl_int64}).rank(1);
    if (t.size(0) < num_logical_chunks) {
      FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must have at least " << num_logical_chunks
                                      << " elements (num_logical_chunks), got " << t.size(0);
    }
    return IndexArray{t.data_ptr(), t.dtype().bits == 64, 1, t.stride(0), 0};
  };
  Expect(op, "output", output).same_device(seq_idx, "seq_idx").dtype({dl_int32}).rank(1).contiguous();
  if (output.size(0) < num_seqs + 1 || num_seqs < 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": output must have at least " << num_seqs + 1
                                    << " elements (num_seqs + 1), got " << output.size(0);
  }
  if (chunk_size <= 0) FLASHINFER_THROW(ArgumentError) << op << ": chunk_size must be positive, got " << chunk_size;
  DeviceGuard guard(seq_idx.device());
  const Status status =
      SeqChunkCumsum(AsSeqIdx(op, seq_idx), indices("chunk_indices", chunk_indices),
                     indices("chunk_offsets", chunk_offsets), output.data_ptr<int32_t>(), int(chunk_size),
                     int(num_logical_chunks), int(seq_idx.size(1)), int(num_seqs), get_stream(seq_idx.device()));
#ifdef FLASHINFER_CPU
  if (status != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": chunk_indices, chunk_offsets and seq_idx must be in range, got others";
  }
#endif
  CheckStatus(op, status);
}
