// SPDX-License-Identifier: Apache-2.0
// globaltimer: write the clock of the GPU to memory, in the order of a stream. One thread; two reads around a call time
// it where CUDA events cannot be trusted, such as under confidential computing.
//   test  pytest tests/autotuner/test_globaltimer.py      bench  none: one thread writes one number
#pragma once
#include "ptx/globaltimer.cuh"
#include "utils.cuh"

namespace flashinfer {

__global__ void GlobalTimerKernel(int64_t* out) { *out = int64_t(ptx::GlobalTimer()); }

inline cudaError_t GlobalTimer(int64_t* out, cudaStream_t stream = nullptr) {
  return Launch(GlobalTimerKernel, dim3(1), dim3(1), false, stream, out);
}

}  // namespace flashinfer
