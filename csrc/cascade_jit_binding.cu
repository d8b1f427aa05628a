// SPDX-License-Identifier: Apache-2.0
// Exports of the cascade module.
#include "cascade.cu"

FLASHINFER_EXPORT(merge_state, merge_state)
FLASHINFER_EXPORT(merge_state_in_place, merge_state_in_place)
FLASHINFER_EXPORT(merge_states, merge_states)
FLASHINFER_EXPORT(variable_length_merge_states, variable_length_merge_states)
FLASHINFER_EXPORT(add_sinks, add_sinks)
