// SPDX-License-Identifier: Apache-2.0
// Tensor cores, under the path that kernels of others include. The wrappers are in ptx/mma.cuh.
#pragma once
#include "ptx/mma.cuh"
