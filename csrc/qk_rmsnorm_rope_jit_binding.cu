// SPDX-License-Identifier: Apache-2.0
// Exports of the qk_rmsnorm_rope module.
#include "qk_rmsnorm_rope.cu"

FLASHINFER_EXPORT(qk_rmsnorm_rope, qk_rmsnorm_rope)
