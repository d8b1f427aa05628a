// SPDX-License-Identifier: Apache-2.0
// Exports of the packbits module.
#include "packbits.cu"

FLASHINFER_EXPORT(packbits, packbits)
FLASHINFER_EXPORT(packed_indptr, packed_indptr)
FLASHINFER_EXPORT(segment_packbits, segment_packbits)
