// SPDX-License-Identifier: Apache-2.0
// Launcher and export of globaltimer. Used by the tuner only; not an operator, so the files of the other layers are
// missing.
#include <flashinfer/globaltimer.cuh>

#include "tvm_ffi_utils.h"

void write_globaltimer(TensorView out) {
  Expect("write_globaltimer", "out", out).on_device().dtype({dl_int64}).contiguous();
  if (out.numel() != 1) {
    FLASHINFER_THROW(ValueError) << "write_globaltimer: out must have 1 element, got " << out.numel();
  }
  DeviceGuard guard(out.device());
  CheckStatus("write_globaltimer",
              flashinfer::GlobalTimer(static_cast<int64_t*>(out.data_ptr()), get_stream(out.device())));
}

FLASHINFER_EXPORT(write_globaltimer, write_globaltimer)
