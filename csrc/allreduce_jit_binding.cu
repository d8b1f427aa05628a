// SPDX-License-Identifier: Apache-2.0
// Exports of the allreduce module.
#include "allreduce.cu"

FLASHINFER_EXPORT(allreduce_fusion, allreduce_fusion)
FLASHINFER_EXPORT(allreduce_check, allreduce_check)
