// SPDX-License-Identifier: Apache-2.0
// The CPU product for test_instruction_sets.py, which compiles it for several instruction sets.
#define FLASHINFER_CPU
#include <flashinfer/gemm_cpu.h>

using namespace flashinfer::gemm;

/// Multiply contiguous tokens with contiguous weights, K-major or not, to float32; block scales are (1, 128, 128).
extern "C" __attribute__((visibility("default"))) void Multiply(float* d, void* a, void* b, const float* a_scale,
                                                                const float* b_scale, int64_t element, bool is_k_major,
                                                                int64_t m, int64_t n, int64_t k) {
  GemmArguments p;
  p.m = m, p.n = n, p.k = k;
  p.a = {a, Element(element), 0, k, 1};
  p.b = {b, Element(element), 0, is_k_major ? k : 1, is_k_major ? 1 : n};
  p.d = {d, Element::kFloat32, 0, n, 1};
  const int64_t blocks = (k + 127) / 128;
  if (a_scale != nullptr) p.a_scale = {a_scale, 0, blocks, 1, 1, 128};
  if (b_scale != nullptr) p.b_scale = {b_scale, 0, blocks, 1, 128, 128};
  Gemm(p, nullptr);
}
