// SPDX-License-Identifier: Apache-2.0
// Included before each emulated source (build.py): CUDA's headers for the host, then the device that kernels see.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#undef __global__
#undef __launch_bounds__
#undef __grid_constant__
#undef __shared__
#undef __align__
#undef __device__
#undef __host__
#undef __constant__
#undef __forceinline__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __noinline__

#include "cuda_api.h"
#include "intrinsics.h"

#define EMULATION_EXPORT extern "C" __attribute__((visibility("default")))

// CUDA's own headers are read: from here on, headers are those of device code.
#ifdef EMULATION_ARCH
#define __CUDA_ARCH__ EMULATION_ARCH
#if EMULATION_ARCH == 900
#define __CUDA_ARCH_FEAT_SM90_ALL
#endif
#endif
