// SPDX-License-Identifier: Apache-2.0
// The general CUDA GEMM kernel on the CPU, called by test_emulation.py through ctypes.
#include <flashinfer/gemm.cuh>

using namespace flashinfer::gemm;

namespace {

Matrix MatrixOf(const int64_t* x) { return {reinterpret_cast<void*>(x[0]), Element(x[1]), x[2], x[3], x[4]}; }

Scale ScaleOf(const int64_t* x) { return {reinterpret_cast<const float*>(x[0]), x[1], x[2], x[3], x[4], x[5]}; }

}  // namespace

/// Compute a product. Returns the status times 100, plus loads * 10 + size of the kernel.
EMULATION_EXPORT int gemm(const int64_t* x, double alpha, double beta) {
  emulation::device.shared_bytes = 99 * 1024;  // the least that a block of any device from SM80 on can have
  GemmArguments g;
  g.a = MatrixOf(x), g.b = MatrixOf(x + 5), g.d = MatrixOf(x + 10);
  g.a_scale = ScaleOf(x + 15), g.b_scale = ScaleOf(x + 21);
  g.bias = reinterpret_cast<const void*>(x[27]), g.bias_element = Element(x[28]);
  g.m = x[29], g.n = x[30], g.k = x[31], g.batch = x[32], g.grouping = Grouping(x[33]);
  g.groups = reinterpret_cast<const int32_t*>(x[34]), g.weight_indices = reinterpret_cast<const int32_t*>(x[35]);
  g.weights = x[36];
  g.alpha = float(alpha), g.beta = float(beta);
  GemmPlan plan;
  const KernelChoice c = ChooseKernel(&plan, g, 2);
  return int(Gemm(g, nullptr)) * 100 + int(c.loads) * 10 + int(c.size);
}
