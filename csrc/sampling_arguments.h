// SPDX-License-Identifier: Apache-2.0
// Reading of arguments that launchers of sampling share: rows, parameters of a filter.
#pragma once
#include <algorithm>

#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/sampling.h>
// clang-format on

namespace flashinfer {
namespace sampling {

/// Validate a tensor of rows: floats on this backend's device, with contiguous columns.
inline void CheckRows(const char* op, const char* name, const TensorView& t, std::initializer_list<DLDataType> dtypes) {
  Expect(op, name, t).on_device().dtype(dtypes).rank(2).last_dim_contiguous();
  if (t.size(1) < 1 || t.size(1) > MAX_VOCAB) {
    FLASHINFER_THROW(ArgumentError) << op << ": " << name << ".shape[1] must be 1 to " << MAX_VOCAB << ", got "
                                    << t.size(1);
  }
}

template <typename T>
PerRow<T> Constant(T value) {
  return {nullptr, value, 1};
}

/// Validate and read a per-row parameter. Python has checked that the tensor is 1-D and, if read, not empty.
template <typename T>
PerRow<T> Parameter(const char* op, const char* name, const Optional<TensorView>& values, T value, DLDataType dtype,
                    const TensorView& input) {
  if (!values.has_value()) return Constant(value);
  Expect(op, name, *values).same_device(input, "the input").dtype({dtype}).rank(1).contiguous();
  return {(*values).template data_ptr<T>(), value, (*values).size(0)};
}

inline PerRow<int32_t> TopKParameter(const char* op, const Optional<TensorView>& values, int64_t value,
                                     const TensorView& input) {
  return Parameter(op, "top_k", values, int32_t(std::clamp<int64_t>(value, 0, INT32_MAX)), dl_int32, input);
}

inline FilterParams FilterOf(Filter filter, PerRow<int32_t> top_k, PerRow<float> top_p, bool by_output) {
  return {filter, top_k, top_p, by_output, by_output};
}

inline FilterParams TopK(PerRow<int32_t> top_k, bool by_output) {
  return FilterOf(Filter::kBoth, top_k, Constant(1.f), by_output);
}

inline FilterParams TopP(PerRow<float> top_p) { return FilterOf(Filter::kBoth, Constant(INT32_MAX), top_p, false); }

template <typename T>
RowParams<T> RowsOf(const TensorView& out, const TensorView& input) {
  RowParams<T> p{};
  p.input = input.data_ptr<T>();
  p.out = out.data_ptr<T>();
  p.input_stride = input.stride(0);
  p.out_stride = out.stride(0);
  p.rows = input.size(0);
  p.vocab = input.size(1);
  return p;
}

}  // namespace sampling
}  // namespace flashinfer
