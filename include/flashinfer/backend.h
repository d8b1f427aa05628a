// SPDX-License-Identifier: Apache-2.0
// Types that launchers use with either backend: element types, stream, status.
#pragma once
#include <cstdint>

#ifdef FLASHINFER_CPU
#include "cpu/scalar.h"
#else
#include <cuda_runtime_api.h>
struct __half;
struct __nv_bfloat16;
struct __nv_fp8_e4m3;
struct __nv_fp8_e5m2;
#endif

namespace flashinfer {

#ifdef FLASHINFER_CPU
using float16_t = cpu::float16;
using bfloat16_t = cpu::bfloat16;
using float8_e4m3_t = cpu::float8_e4m3;
using float8_e5m2_t = cpu::float8_e5m2;
using Stream = void*;
using Status = int;  // 0 is success; CPU kernels validate in the launcher and do not fail
#else
using float16_t = __half;
using bfloat16_t = __nv_bfloat16;
using float8_e4m3_t = __nv_fp8_e4m3;
using float8_e5m2_t = __nv_fp8_e5m2;
using Stream = cudaStream_t;
using Status = cudaError_t;
#endif

}  // namespace flashinfer
