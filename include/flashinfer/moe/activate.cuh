// SPDX-License-Identifier: Apache-2.0
// Activations between the two products of an expert on CUDA; formulas in fp32. The type is a branch that all threads
// take alike: a template parameter would multiply kernels that wait for memory.
#pragma once
#include "layer.h"
#include "swiglu.h"

namespace flashinfer {
namespace fused_moe {

/// Constants of one expert: alpha, beta and limit, or the two of Situ.
struct ActivationConstants {
  float a, b, limit;
};

__device__ __forceinline__ ActivationConstants ConstantsOf(const ActivationParams& p, int expert) {
  const auto constant = [&](const float* values, float standard) {
    return values == nullptr ? standard : values[expert];
  };
  if (p.type == ActivationType::kSitu) {
    return {constant(p.situ_beta, 4.f), constant(p.situ_linear_beta, 25.f), 0.f};
  }
  const bool is_step = p.type == ActivationType::kSwigluStep;
  return {constant(p.alpha, 1.f), constant(p.beta, 0.f), constant(p.limit, is_step ? 7.f : __int_as_float(0x7F800000))};
}

// By a comparison, because fmaxf turns NaN into zero, where the CPU and torch keep it.
__device__ __forceinline__ float Relu(float x) { return x < 0.f ? 0.f : x; }

__device__ __forceinline__ float ActivateValue(ActivationType type, const ActivationConstants& c, float g, float u) {
  using activation::Activate;
  switch (type) {
    case ActivationType::kGelu:
      return Activate<Activation::kGelu>(g);
    case ActivationType::kRelu:
      return Relu(g);
    case ActivationType::kSilu:
      return Activate<Activation::kSilu>(g);
    case ActivationType::kSwiglu:
      return Swiglu(g, u);
    case ActivationType::kGeglu:
      return Activate<Activation::kGelu>(g) * u;
    case ActivationType::kGegluTanh:
      return Activate<Activation::kGeluTanh>(g) * u;
    case ActivationType::kRelu2:
      return Relu(g) * Relu(g);
    case ActivationType::kSwigluBias:
      return Swiglu(g, u, c.a, c.b, c.limit);
    case ActivationType::kSwigluStep:
      return SwigluStep(g, u, c.limit);
    case ActivationType::kSitu:  // tanhf: the approximate instruction is too far off
      return c.a * tanhf(g / c.a) * Sigmoid(g) * (c.b * tanhf(u / c.b));
    default:
      return g;
  }
}

}  // namespace fused_moe
}  // namespace flashinfer
