// SPDX-License-Identifier: Apache-2.0
// Gated activations: out[r][c] = act(gate[r][c]) * up[r][c], parameters and entry shared by both backends.
//   silu       x / (1 + e^-x)
//   gelu       x * Phi(x), Phi the normal distribution: 0.5 x (1 + erf(x / sqrt 2))
//   gelu_tanh  0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3). That is x / (1 + e^-2u), so no tanh is needed
//   sigmoid    1 / (1 + e^-x)
// Defined in activation.cuh (CUDA) and activation_cpu.h (CPU). Arithmetic is fp32 with one rounding, of the product.
//   test  pytest tests/activation      bench  python benchmarks/bench_activation.py
#pragma once
#include "backend.h"

namespace flashinfer {

/// kCustom has no formula here: sources of get_act_and_mul_cu_str specialise activation::Activate for it.
enum class Activation : int { kSilu, kGelu, kGeluTanh, kSigmoid, kCustom };

/// Rows of contiguous columns. `out` may be `gate` or `up`: each element is read before it is written.
template <typename T>
struct ActAndMulParams {
  const T* gate;
  const T* up;
  T* out;
  int64_t rows;
  int64_t columns;
  int64_t gate_stride;  ///< between rows, in elements
  int64_t up_stride;
  int64_t out_stride;
  bool enable_pdl;  ///< CUDA only: programmatic dependent launch
};

template <Activation ACT, typename T>
Status ActAndMul(const ActAndMulParams<T>& params, Stream stream);

namespace activation {

// 2u of gelu_tanh is x * (LINEAR + CUBIC * x^2).
constexpr float GELU_TANH_LINEAR = 1.5957691216f, GELU_TANH_CUBIC = 0.0713548163f;

// erfc(z) = t (c1 + t (c2 + ... t c5)) e^(-z^2) with t = 1 / (1 + SLOPE z), z >= 0, to 1.5e-7 (Abramowitz and Stegun
// 7.1.26). With z = |x| / sqrt 2 it gives both tails of Phi, and the small one without cancellation.
constexpr float ERFC_SLOPE = 0.3275911f;
constexpr float ERFC_1 = 0.254829592f, ERFC_2 = -0.284496736f, ERFC_3 = 1.421413741f, ERFC_4 = -1.453152027f,
                ERFC_5 = 1.061405429f;
constexpr float SQRT_HALF = 0.7071067812f;

}  // namespace activation
}  // namespace flashinfer
