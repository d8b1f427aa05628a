// SPDX-License-Identifier: Apache-2.0
// The name under which published callers list the norm binding (with norm.cu) to compile the family by hand.
#include "norm_jit_binding.cu"
