// SPDX-License-Identifier: Apache-2.0
// Exports of the concat_mla module.
#include "concat_mla.cu"

FLASHINFER_EXPORT(concat_mla_k, concat_mla_k)
