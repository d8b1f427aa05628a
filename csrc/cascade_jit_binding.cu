// SPDX-License-Identifier: Apache-2.0
// Exports of the cascade module.
#include "tvm_ffi_utils.h"

void merge_state(TensorView v, TensorView s, TensorView v_a, TensorView s_a, TensorView v_b, TensorView s_b);
void merge_state_in_place(TensorView v, TensorView s, TensorView v_other, TensorView s_other,
                          Optional<TensorView> mask);
void merge_states(TensorView v_merged, TensorView s_merged, TensorView v, TensorView s);
void variable_length_merge_states(TensorView v_merged, TensorView s_merged, TensorView v, TensorView s,
                                  TensorView indptr);
void add_sinks(TensorView v, TensorView s, TensorView sinks);

FLASHINFER_EXPORT(merge_state, merge_state)
FLASHINFER_EXPORT(merge_state_in_place, merge_state_in_place)
FLASHINFER_EXPORT(merge_states, merge_states)
FLASHINFER_EXPORT(variable_length_merge_states, variable_length_merge_states)
FLASHINFER_EXPORT(add_sinks, add_sinks)
