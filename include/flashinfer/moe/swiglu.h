// SPDX-License-Identifier: Apache-2.0
// SwiGLU of a layer of experts and its relatives, once for every kernel: the epilogue of a product, the kernels between products, and the
// CPU, where a Value is a vector. Values are limited by comparisons, because fmin and fmax turn NaN into the limit: NaN
// stays NaN, whichever kernel serves a number of tokens.
//   test  pytest tests/fused_moe/test_not_a_number.py tests/fused_moe/test_emulated_layer.py
#pragma once
#ifdef FLASHINFER_CPU
#include "../activation_cpu.h"
#else
#include "../activation.cuh"
#endif

namespace flashinfer {
namespace fused_moe {

#ifdef FLASHINFER_CPU
using Value = cpu::Vec;
inline Value Sigmoid(const Value& x) { return 1.f / (1.f + cpu::Exp(-x)); }
inline Value Silu(const Value& x) { return cpu::Activate<Activation::kSilu>(x); }
/// tanh by way of the exponential: the absolute error is 1e-7, and infinity gives 1.
inline Value Tanh(const Value& x) { return 1.f - 2.f / (1.f + cpu::Exp(x + x)); }
#else
using Value = float;
using activation::Sigmoid;
__device__ __forceinline__ Value Silu(const Value& x) { return activation::Activate<Activation::kSilu>(x); }
// The approximate instruction is too far off.
__device__ __forceinline__ Value Tanh(const Value& x) { return tanhf(x); }
#endif

/// Return x, but `limit` where x is greater.
__device__ __forceinline__ Value UpTo(const Value& x, const Value& limit) { return x > limit ? limit : x; }

/// Return x, limited to [-limit, limit].
__device__ __forceinline__ Value Clamp(const Value& x, const Value& limit) {
  return UpTo(x < -limit ? -limit : x, limit);
}

/// Return g sigmoid(alpha g) (u + beta), where g is `gate` up to `limit` and u is `up` limited to both sides.
__device__ __forceinline__ Value Swiglu(const Value& gate, const Value& up, const Value& alpha, const Value& beta,
                                        const Value& limit) {
  const Value g = UpTo(gate, limit), u = Clamp(up, limit);
  return g * Sigmoid(alpha * g) * (u + beta);
}

/// Return the same with alpha 1, beta 0 and no limit.
__device__ __forceinline__ Value Swiglu(const Value& gate, const Value& up) { return Silu(gate) * up; }

/// Return silu(gate) up to `limit`, times `up` limited to both sides.
__device__ __forceinline__ Value SwigluStep(const Value& gate, const Value& up, const Value& limit) {
  return UpTo(Silu(gate), limit) * Clamp(up, limit);
}

/// Return gate and up, each limited smoothly by its constant, times the sigmoid of the gate.
__device__ __forceinline__ Value Situ(const Value& gate, const Value& up, const Value& beta, const Value& linear_beta) {
  return beta * Tanh(gate / beta) * Sigmoid(gate) * (linear_beta * Tanh(up / linear_beta));
}

}  // namespace fused_moe
}  // namespace flashinfer
