// SPDX-License-Identifier: Apache-2.0
// Tensor core wrappers under the path that external kernels include. The wrappers are in ptx/mma.cuh.
#pragma once
#include "ptx/mma.cuh"
