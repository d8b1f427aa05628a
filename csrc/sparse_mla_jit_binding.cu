// SPDX-License-Identifier: Apache-2.0
// Exports of a sparse_mla module.
#include "sparse_mla.cu"

FLASHINFER_EXPORT(run, sparse_mla_run)
