// SPDX-License-Identifier: Apache-2.0
// Exports of the api_log_stats module.
#include "tvm_ffi_utils.h"

void api_log_stats(TensorView x, int64_t id);

FLASHINFER_EXPORT(api_log_stats, api_log_stats)
