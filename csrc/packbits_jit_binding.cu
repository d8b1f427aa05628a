// SPDX-License-Identifier: Apache-2.0
// Exports of the packbits module.
#include "tvm_ffi_utils.h"

void packbits(TensorView out, TensorView x, bool is_little);
void packed_indptr(TensorView new_indptr, TensorView num_bytes, TensorView x, TensorView indptr);
void segment_packbits(TensorView out, TensorView x, TensorView indptr, TensorView new_indptr, bool is_little);

TVM_FFI_DLL_EXPORT_TYPED_FUNC(packbits, packbits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_indptr, packed_indptr);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(segment_packbits, segment_packbits);
