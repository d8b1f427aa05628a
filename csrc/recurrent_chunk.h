// SPDX-License-Identifier: Apache-2.0
// Parts of the launchers of the chunked delta rules: tensors to parameters of recurrent/chunk/params.h, with checks.
#pragma once
#include <flashinfer/recurrent/chunk/params.h>

#include "tvm_ffi_utils.h"

namespace recurrent_chunk {

using flashinfer::recurrent::DIM;
using flashinfer::recurrent::Integers;
using flashinfer::recurrent::States;
using flashinfer::recurrent::StateType;

using OptionalTensor = Optional<TensorView>;

inline StateType StateTypeOf(DLDataType dtype) {
  switch (encode_dlpack_dtype(dtype)) {
    case encode_dlpack_dtype(dl_bfloat16):
      return StateType::kBf16;
    case encode_dlpack_dtype(dl_float16):
      return StateType::kF16;
    case encode_dlpack_dtype(dl_float8_e4m3fn):
      return StateType::kE4M3;
    case encode_dlpack_dtype(dl_float8_e5m2):
      return StateType::kE5M2;
    default:
      return StateType::kF32;
  }
}

/// Validate states [slots, heads, DIM, DIM] of any strides.
inline States StatesOf(const char* op, const char* name, const OptionalTensor& given, const TensorView& q,
                       int64_t heads) {
  if (!given.has_value()) return {};
  const TensorView t = given.value();
  Expect(op, name, t)
      .same_device(q, "q")
      .dtype({dl_float32, dl_bfloat16, dl_float16, dl_float8_e4m3fn, dl_float8_e5m2})
      .rank(4)
      .dim(1, heads, "the number of output heads")
      .dim(2, DIM, "the head dimension of v")
      .dim(3, DIM, "the head dimension of k");
  return {t.data_ptr(), StateTypeOf(t.dtype()), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

inline Integers IntegersOf(const char* op, const char* name, const OptionalTensor& given, const TensorView& q,
                           int64_t count) {
  if (!given.has_value()) return {};
  const TensorView t = given.value();
  Expect(op, name, t)
      .same_device(q, "q")
      .dtype({dl_int32, dl_int64})
      .rank(1)
      .dim(0, count, "from cu_seqlens")
      .contiguous();
  return {t.data_ptr(), t.dtype().bits == 64};
}

}  // namespace recurrent_chunk
