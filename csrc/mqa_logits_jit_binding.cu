// SPDX-License-Identifier: Apache-2.0
// Exports of the mqa_logits module.
#include "mqa_logits.cu"

FLASHINFER_EXPORT(mqa_logits, mqa_logits)
FLASHINFER_EXPORT(ragged_mqa_logits, ragged_mqa_logits)
FLASHINFER_EXPORT(mqa_schedule, mqa_schedule)
