// SPDX-License-Identifier: Apache-2.0
// Gated activations on CUDA (formulas and parameters: activation.h). Three elements of memory per result and about ten
// instructions, two of them special functions: bound by DRAM.
//
// A thread makes one 16-byte vector of the output from two loads that are issued together. The grid is (chunks of a
// row, rows), so no thread divides; short rows share a block. Rows aligned to 8 bytes only (an odd half width) take
// vectors of that size, anything else single elements.
//   test  pytest tests/activation      bench  python benchmarks/bench_activation.py
#pragma once
#include "activation.h"
#include "ptx/math.cuh"
#include "ptx/pdl.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace activation {

constexpr float LOG2_E = 1.4426950409f;

/// Return 1 / (1 + e^-x) in four instructions. The relative error is about 1e-7 * (1 + |x|), since the product with
/// LOG2_E is rounded. If e^-x overflows, the result is 0, the right limit.
__device__ __forceinline__ float Sigmoid(float x) { return ptx::Reciprocal(1.f + ptx::Exp2(-LOG2_E * x)); }

template <Activation ACT>
__device__ __forceinline__ float Activate(float x) {
  if constexpr (ACT == Activation::kSigmoid) {
    return Sigmoid(x);
  } else if constexpr (ACT == Activation::kSilu) {
    return x * Sigmoid(x);
  } else if constexpr (ACT == Activation::kGeluTanh) {
    return x * Sigmoid(x * (GELU_TANH_LINEAR + GELU_TANH_CUBIC * x * x));
  } else {
    const float z = fabsf(x) * SQRT_HALF;
    const float t = ptx::Reciprocal(1.f + ERFC_SLOPE * z);
    const float series = t * (ERFC_1 + t * (ERFC_2 + t * (ERFC_3 + t * (ERFC_4 + t * ERFC_5))));
    const float tail = 0.5f * series * ptx::Exp2(-LOG2_E * z * z);
    return x * (x < 0.f ? tail : 1.f - tail);
  }
}

/// ActAndMulParams in the form that the kernel reads: 32-bit sizes, rows and columns in vectors.
template <typename T>
struct RowArgs {
  const T* gate;
  const T* up;
  T* out;
  uint32_t gate_stride, up_stride, out_stride;
  uint32_t rows, vectors;
  int last;  // elements of the last vector of a row
};

/// Kernel of all activations. Block (lanes, rows), grid (chunks, y, z): y and z together count the row groups.
template <Activation ACT, typename T, int VEC>
__global__ void __launch_bounds__(128) ActAndMulKernel(const __grid_constant__ RowArgs<T> a) {
  using V = Vec<T, VEC>;
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const uint32_t row = (blockIdx.z * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
  const uint32_t vector = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= a.rows || vector >= a.vectors) return;
  auto offset = [&](uint32_t stride) { return (uint64_t{row} * stride + vector) * VEC; };
  const T *gate = a.gate + offset(a.gate_stride), *up = a.up + offset(a.up_stride);
  T* out = a.out + offset(a.out_stride);
  const bool partial = VEC > 1 && a.last != VEC && vector + 1 == a.vectors;
  if (__builtin_expect(partial, false)) {
#pragma unroll 1
    for (int i = 0; i < a.last; ++i) out[i] = FromFloat<T>(Activate<ACT>(ToFloat(gate[i])) * ToFloat(up[i]));
    return;
  }
  const V g = V::Load(gate), u = V::Load(up);
  float y[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) y[i] = Activate<ACT>(g.Float(i)) * u.Float(i);
  RoundTo<T, VEC>(y).Store(out);
}

/// True if every row of all three arrays starts at a multiple of `vec` elements.
template <typename T>
bool CanVectorise(const ActAndMulParams<T>& p, int vec) {
  const size_t bytes = vec * sizeof(T);
  const bool rows_align =
      p.rows == 1 || (p.gate_stride % vec == 0 && p.up_stride % vec == 0 && p.out_stride % vec == 0);
  return rows_align && IsAligned(p.gate, bytes) && IsAligned(p.up, bytes) && IsAligned(p.out, bytes);
}

}  // namespace activation

template <Activation ACT, typename T>
Status ActAndMul(const ActAndMulParams<T>& p, Stream stream) {
  using namespace activation;
  constexpr int VEC = 16 / sizeof(T);
  constexpr int64_t THREADS = 128, MAX_Y = 65535;  // threads per block; limit of gridDim.y
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  auto launch = [&](auto kernel, int vec) {
    const int64_t vectors = CeilDiv(p.columns, vec), chunks = CeilDiv(vectors, THREADS);
    const int64_t lanes = chunks == 1 ? vectors : THREADS;
    const int64_t groups = CeilDiv(p.rows, THREADS / lanes), z = CeilDiv(groups, MAX_Y);
    if (vectors > INT32_MAX || p.rows > INT32_MAX) return cudaErrorInvalidValue;
    RowArgs<T> a{p.gate, p.up, p.out};
    a.rows = uint32_t(p.rows);
    a.vectors = uint32_t(vectors);
    a.last = int(p.columns - (vectors - 1) * vec);
    if (p.rows > 1) {  // the stride of a single row may be anything
      if (std::max({p.gate_stride, p.up_stride, p.out_stride}) / vec > UINT32_MAX) return cudaErrorInvalidValue;
      a.gate_stride = uint32_t(p.gate_stride / vec);
      a.up_stride = uint32_t(p.up_stride / vec);
      a.out_stride = uint32_t(p.out_stride / vec);
    }
    const dim3 grid(chunks, CeilDiv(groups, z), z), block(lanes, THREADS / lanes);
    return Launch(kernel, grid, block, p.enable_pdl, stream, a);
  };
  if (CanVectorise(p, VEC)) return launch(ActAndMulKernel<ACT, T, VEC>, VEC);
  if (CanVectorise(p, VEC / 2)) return launch(ActAndMulKernel<ACT, T, VEC / 2>, VEC / 2);
  return launch(ActAndMulKernel<ACT, T, 1>, 1);
}

}  // namespace flashinfer
