// SPDX-License-Identifier: Apache-2.0
// Exports of a mqa_logits_sm90 module.
#include "mqa_logits_sm90.cu"

FLASHINFER_EXPORT(mqa_logits_sm90, mqa_logits_sm90)
