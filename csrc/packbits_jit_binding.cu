// SPDX-License-Identifier: Apache-2.0
// Exports of the packbits module.
#include "tvm_ffi_utils.h"

void packbits(TensorView out, TensorView x, bool is_little);
void packed_indptr(TensorView new_indptr, TensorView num_bytes, TensorView x, TensorView indptr);
void segment_packbits(TensorView out, TensorView x, TensorView indptr, TensorView new_indptr, bool is_little);

FLASHINFER_EXPORT(packbits, packbits)
FLASHINFER_EXPORT(packed_indptr, packed_indptr)
FLASHINFER_EXPORT(segment_packbits, segment_packbits)
