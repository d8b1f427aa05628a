// SPDX-License-Identifier: Apache-2.0
// Rows of 128 numbers divided by their Euclidean norm, for callers that pass queries and keys as they come from the model.
//   one row per warp, 8 bytes per lane; bound by memory
//   test  pytest tests/recurrent/test_gdn_prefill.py -k l2norm      bench  python benchmarks/bench_recurrent.py
#pragma once
#include "../../ptx/pdl.cuh"
#include "../../utils.cuh"
#include "convert.cuh"

namespace flashinfer {
namespace recurrent {

template <typename T>
__global__ void __launch_bounds__(256) NormalizeRowsKernel(const T* in, T* out, int64_t rows) {
  const int64_t row = int64_t(blockIdx.x) * 8 + threadIdx.x / 32;
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  if (row >= rows) return;
  const int64_t at = row * (DIM / 4) + threadIdx.x % 32;
  const uint2 words = reinterpret_cast<const uint2*>(in)[at];
  const float2 x = UnpackPair<T>(words.x), y = UnpackPair<T>(words.y);
  const float factor = rsqrtf(GroupSum(x.x * x.x + x.y * x.y + y.x * y.x + y.y * y.y, 32) + 1e-6f);
  reinterpret_cast<uint2*>(out)[at] = {PackPair<T>(x.x * factor, x.y * factor),
                                       PackPair<T>(y.x * factor, y.y * factor)};
}

template <typename T>
Status NormalizeRows(const T* in, T* out, int64_t rows, bool enable_pdl, Stream stream) {
  const dim3 grid(unsigned(CeilDiv(rows, 8)));
  return Launch(NormalizeRowsKernel<T>, grid, dim3(256), enable_pdl, stream, in, out, rows);
}

}  // namespace recurrent
}  // namespace flashinfer
