// SPDX-License-Identifier: Apache-2.0
// Exports of the ssd module.
#include "ssd.cu"

FLASHINFER_EXPORT(ssd_combined_fwd, ssd_combined_fwd)
FLASHINFER_EXPORT(seq_chunk_cumsum, seq_chunk_cumsum)
