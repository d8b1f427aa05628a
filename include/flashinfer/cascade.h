// SPDX-License-Identifier: Apache-2.0
// Merging attention over parts of the keys: parameters and entries, shared by both backends.
//   A state is the output v of attention over some keys and its score s = log2(sum of e^logit) over them. The state of
//   their union has  s = log2(sum_i 2^s_i)  and  v = sum_i 2^(s_i - s) v_i. No keys at all is s = -inf, and v = 0 then:
//   such a state adds nothing, whatever its v holds.
// Defined in cascade.cuh (CUDA) and cascade_cpu.h (CPU). Arithmetic is fp32 with one rounding, of the result.
//   test  pytest tests/cascade      bench  python benchmarks/bench_cascade.py
#pragma once
#include <cstdint>
#include <type_traits>

#include "backend.h"

namespace flashinfer {

/// States of (row, head). Strides are in elements; each v is contiguous. T may be const.
template <typename T>
struct AttentionStates {
  T* v;
  std::conditional_t<std::is_const_v<T>, const float, float>* s;
  int64_t v_row_stride, v_head_stride;
  int64_t s_row_stride, s_head_stride;
};

/// Merge of two states per row and head. `out` may be `a` or `b`.
template <typename T>
struct MergeStateParams {
  AttentionStates<const T> a, b;
  AttentionStates<T> out;
  const uint8_t* mask;  ///< one byte per row, or null: rows with 0 are left as they are
  int64_t mask_stride;
  int64_t rows, heads;
  int64_t head_dim;  ///< at least 1
  bool enable_pdl;   ///< CUDA only: programmatic dependent launch
};

/// Merge of several states per row. `out` must not overlap `in`.
template <typename T>
struct MergeStatesParams {
  AttentionStates<const T> in;
  AttentionStates<T> out;
  int64_t v_state_stride, s_state_stride;  ///< between the states of one row
  int64_t num_states;                      ///< states per row; 0 gives the state of no keys
  const int32_t* indptr;                   ///< or [rows + 1]: the states of each row in `in`, whose row strides are 0
  int64_t rows, heads, head_dim;
  bool enable_pdl;
};

/// Attention sink of each head, a logit without a value: the state of v = 0 and s = sink / ln(2), merged into `states`.
template <typename T>
struct AddSinksParams {
  AttentionStates<T> states;
  const float* sinks;  ///< one per head, natural logarithms
  int64_t sink_stride;
  int64_t rows, heads;
  int64_t head_dim;  ///< at least 1
  bool enable_pdl;
};

template <typename T>
Status MergeState(const MergeStateParams<T>& params, Stream stream);

template <typename T>
Status MergeStates(const MergeStatesParams<T>& params, Stream stream);

template <typename T>
Status AddSinks(const AddSinksParams<T>& params, Stream stream);

}  // namespace flashinfer
