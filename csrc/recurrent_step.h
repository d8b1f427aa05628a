// SPDX-License-Identifier: Apache-2.0
// Common parts of the launchers of the step kernels: tensors to the parameters of recurrent/step.h, with their checks.
#pragma once
#include <flashinfer/recurrent/step.h>

#include <limits>

#include "tvm_ffi_utils.h"

namespace recurrent_step {

using flashinfer::recurrent::ElementType;
using flashinfer::recurrent::Indices;
using flashinfer::recurrent::Numbers;
using flashinfer::recurrent::States;
using flashinfer::recurrent::StepParams;
using flashinfer::recurrent::TokenStrides;

using OptionalView = Optional<TensorView>;

inline ElementType TypeOf(const TensorView& t) {
  if (t.dtype().bits == 32) return ElementType::kFloat;
  return t.dtype().code == kDLBfloat ? ElementType::kBfloat : ElementType::kHalf;
}

/// Strides of a (batch, token, head, channel) tensor, or of one of (batch, token, head) numbers.
inline TokenStrides StridesOf(const TensorView& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

inline Numbers NumbersOf(const TensorView& t) { return {t.data_ptr(), StridesOf(t), TypeOf(t)}; }
/// Numbers of one per head.
inline Numbers HeadNumbersOf(const TensorView& t) { return {t.data_ptr(), {0, 0, t.stride(0)}, TypeOf(t)}; }

/// Check a vector or matrix of integers; on the CPU also that each is below `end`. Negative ones are legal.
inline Indices IndicesOf(const char* op, const char* name, const TensorView& t, const TensorView& like, int rank,
                         int64_t rows, const char* of_rows, int64_t end = std::numeric_limits<int64_t>::max()) {
  Expect(op, name, t).same_device(like, "q").dtype({dl_int32, dl_int64}).rank(rank).dim(0, rows, of_rows);
  Indices found{t.data_ptr(), t.stride(0), rank == 2 ? t.stride(1) : 0, t.dtype().bits == 64};
#ifdef FLASHINFER_CPU
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t c = 0; c < (rank == 2 ? t.size(1) : 1); ++c) {
      if (found.At(n, c) >= end) {
        FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must be below " << end << ", got " << found.At(n, c);
      }
    }
  }
#endif
  return found;
}

/// Check q, k, v and write them to the parameters; with `takes_float`, those of float32 on the CPU.
inline void SetTokens(const char* op, StepParams& p, const TensorView& q, const TensorView& k, const TensorView& v,
                      bool takes_float = false) {
  Expect(op, "q", q).on_device().rank(4).last_dim_contiguous();
  if (takes_float) {
    Expect(op, "q", q).dtype({dl_float16, dl_bfloat16, dl_float32});
  } else {
    Expect(op, "q", q).dtype({dl_float16, dl_bfloat16});
  }
  Expect(op, "k", k).same_device(q, "q").same_dtype(q, "q").same_shape(q, "q").last_dim_contiguous();
  Expect(op, "v", v)
      .same_device(q, "q")
      .same_dtype(q, "q")
      .rank(4)
      .dim(0, q.size(0), "q.shape[0]")
      .dim(1, q.size(1), "q.shape[1]")
      .last_dim_contiguous();
  p.sequences = q.size(0), p.tokens = q.size(1);
  p.key_heads = q.size(2), p.value_heads = v.size(2);
  p.key_dim = q.size(3), p.value_dim = v.size(3);
  if (p.key_heads == 0 ? p.value_heads != 0 : p.value_heads % p.key_heads != 0) {
    FLASHINFER_THROW(ArgumentError) << op << ": v.shape[2] must be a multiple of q.shape[2] (" << p.key_heads
                                    << " heads of q and k), got " << p.value_heads;
  }
  p.key_group = flashinfer::FastDivisor(uint32_t(p.key_heads == 0 ? 1 : p.value_heads / p.key_heads));
  p.q = q.data_ptr(), p.k = k.data_ptr(), p.v = v.data_ptr();
  p.q_stride = StridesOf(q), p.k_stride = StridesOf(k), p.v_stride = StridesOf(v);
}

inline void SetOutput(const char* op, StepParams& p, const TensorView& out, const char* name, const TensorView& v) {
  Expect(op, name, out)
      .same_device(v, "v")
      .same_shape(v, "v")
      .dtype({dl_bfloat16, dl_float16, dl_float32})
      .last_dim_contiguous()
      .distinct()
      .apart(v, "v");
  p.out = out.data_ptr(), p.out_stride = StridesOf(out), p.out_type = TypeOf(out);
}

/// Check one number per token and value head.
inline Numbers GateOf(const char* op, const char* name, const StepParams& p, const TensorView& t, const TensorView& v) {
  Expect(op, name, t)
      .same_device(v, "v")
      .dtype({dl_bfloat16, dl_float16, dl_float32})
      .rank(3)
      .dim(0, v.size(0), "v.shape[0]")
      .dim(1, v.size(1), "v.shape[1]")
      .dim(2, p.value_heads, "v.shape[2]");
  return NumbersOf(t);
}

/// Check a pool of states [slots, value heads, V, K], rows of K contiguous.
inline States StatesOf(const char* op, const char* name, const StepParams& p, const TensorView& t,
                       const TensorView& like) {
  Expect(op, name, t)
      .same_device(like, "q")
      .rank(4)
      .dim(1, p.value_heads, "v.shape[2]")
      .dim(2, p.value_dim, "v.shape[3]")
      .dim(3, p.key_dim, "q.shape[3]")
      .last_dim_contiguous();
  return {t.data_ptr(), t.stride(0), 0, t.stride(1), t.stride(2), {}};
}

inline bool Aligned(const void* data, int64_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }
inline bool Aligned(const void* data, const TokenStrides& s) {
  return Aligned(data, 16) && (s.sequence | s.token | s.head) % 8 == 0;
}
inline bool Aligned(const States& s, int64_t element) {
  return Aligned(s.data, 16) && ((s.slot | s.token | s.head | s.row) * element) % 16 == 0;
}

/// True if rows of q, k, g and of all states begin where vectors can be loaded.
inline bool IsVectorised(const StepParams& p, int64_t state_bytes) {
  return Aligned(p.k, p.k_stride) && (p.out == nullptr || Aligned(p.q, p.q_stride)) &&
         (p.g == nullptr || Aligned(p.g, p.g_stride)) && Aligned(p.initial, state_bytes) &&
         (p.final.data == nullptr || Aligned(p.final, state_bytes)) &&
         (p.each.data == nullptr || Aligned(p.each, state_bytes));
}

template <typename Rule, typename T>
void RunOf(const char* op, const StepParams& p, DLDataType state, flashinfer::Stream stream) {
  using namespace flashinfer::recurrent;  // NOLINT(*)
  switch (encode_dlpack_dtype(state)) {
    case encode_dlpack_dtype(dl_float32):
      return CheckStatus(op, Step<Rule, T, float>(p, stream));
    case encode_dlpack_dtype(dl_bfloat16):
      return CheckStatus(op, Step<Rule, T, flashinfer::bfloat16_t>(p, stream));
    default:
      if constexpr (!Rule::CHANNEL_DECAY) {
        return CheckStatus(op, Step<Rule, T, flashinfer::float16_t>(p, stream));
      }
  }
}

}  // namespace recurrent_step
