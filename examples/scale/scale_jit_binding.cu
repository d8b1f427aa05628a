// SPDX-License-Identifier: Apache-2.0
// What Python can call: `module.run(input, output, factor)`.
#include "scale.cu"
#include "tvm_ffi_utils.h"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, scale_launcher);
