// SPDX-License-Identifier: Apache-2.0
// Arguments of the Mamba-2 launchers: tensors as the strided arrays of recurrent/arrays.h, and their checks.
#pragma once
#include <flashinfer/recurrent/arrays.h>

#include "tvm_ffi_utils.h"

namespace flashinfer {
namespace recurrent {

constexpr DLDataType dl_int8{kDLInt, 8, 1};
constexpr DLDataType dl_int16{kDLInt, 16, 1};

/// Check that `t` has float numbers on the device of `state`, and return it as weights whose last dimension is `rows`.
inline WeightArray AsWeights(const char* op, const char* name, const TensorView& t, const TensorView& state, int rank) {
  Expect(op, name, t).same_device(state, "state").dtype({dl_float32, dl_bfloat16, dl_float16}).rank(rank);
  const bool is_float = t.dtype().code == kDLFloat;
  const WeightType type = !is_float              ? WeightType::kBfloat16
                          : t.dtype().bits == 32 ? WeightType::kFloat
                                                 : WeightType::kHalf;
  return {t.data_ptr(), type, 0, 0, t.stride(rank - 2), t.stride(rank - 1)};
}

/// Check indices of 32 or 64 bits, (n,) or (n, columns).
inline IndexArray AsIndices(const char* op, const char* name, const Optional<TensorView>& given,
                            const TensorView& state, int most_rank = 1) {
  if (!given.has_value()) return {};
  const TensorView& t = given.value();
  Expect(op, name, t).same_device(state, "state").dtype({dl_int32, dl_int64}).rank(1, most_rank);
  const int columns = t.ndim() == 2 ? int(t.size(1)) : 1;
  return {t.data_ptr(), t.dtype().bits == 64, columns, t.stride(0), t.ndim() == 2 ? t.stride(1) : 0};
}

/// Check tokens (batch, heads, n), (batch, tokens, heads, n) or, packed, (tokens, heads, n); n contiguous.
template <typename T>
TokenArray<T> AsTokens(const TensorView& t, bool is_packed) {
  const int heads = t.ndim() - 2;
  TokenArray<T> a{static_cast<std::remove_const_t<T>*>(t.data_ptr()), t.stride(0), 0, t.stride(heads)};
  if (is_packed) a.token = t.stride(0);
  if (t.ndim() == 4) a.token = t.stride(1);
  return a;
}

/// Check a state (slots, heads, dim, dstate) whose rows are contiguous, and return it without a scale.
template <typename T>
StateArray<T> AsState(const TensorView& t) {
  return {static_cast<T*>(t.data_ptr()), t.stride(0), t.stride(1), t.stride(2), nullptr, 0, 0};
}

/// Check that rows of a state begin at multiples of `bytes`, as loads of vectors need.
inline void CheckAlignment(const char* op, const char* name, const TensorView& t, int bytes) {
#ifndef FLASHINFER_CPU
  const int64_t size = t.dtype().bits / 8;
  bool aligned = reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes == 0;
  for (int i = 0; i + 1 < t.ndim(); ++i) aligned = aligned && (t.size(i) <= 1 || t.stride(i) * size % bytes == 0);
  if (!aligned) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << name << " must have rows aligned to " << bytes
                                    << " bytes (address and strides), got others";
  }
#endif
}

/// Check the scale of a state, (slots, heads, dim) or (slots, heads, dim, 1), dim contiguous.
inline void CheckScale(const char* op, const char* name, const TensorView& scale, const TensorView& state,
                       int lead = 0) {
  Expect expect(op, name, scale);
  expect.same_device(state, "state").dtype({dl_float32}).rank(lead + 3, lead + 4);
  for (int i = 0; i < 2; ++i)
    expect.dim(lead + 1 + i, state.size(1 + i), i ? "the dim of state" : "the heads of state");
  if (scale.ndim() == lead + 4) expect.dim(lead + 3, 1, "one scale for each row");
  if (scale.size(lead + 2) > 1 && scale.stride(lead + 2) != 1) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << name << ".stride(" << (lead + 2) << ") must be 1, got "
                                    << scale.stride(lead + 2);
  }
}

}  // namespace recurrent
}  // namespace flashinfer
