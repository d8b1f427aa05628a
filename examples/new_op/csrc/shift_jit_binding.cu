// SPDX-License-Identifier: Apache-2.0
// Exports of the shift module.
#include "shift.cu"

FLASHINFER_EXPORT(shift, shift)
