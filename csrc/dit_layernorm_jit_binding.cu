// SPDX-License-Identifier: Apache-2.0
// Exports of the dit_layernorm module.
#include "dit_layernorm.cu"

FLASHINFER_EXPORT(dit_layernorm, dit_layernorm)
