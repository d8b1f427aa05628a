// SPDX-License-Identifier: Apache-2.0
// Activations between the two products of an expert on CUDA; formulas in fp32. The type is a branch that all threads
// take alike: a template parameter would multiply kernels that wait for memory.
#pragma once
#include "layer.h"
#include "swiglu.h"

namespace flashinfer {
namespace fused_moe {

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
    case ActivationType::kSitu:
      return Situ(g, u, c.a, c.b);
    default:
      return g;
  }
}

}  // namespace fused_moe
}  // namespace flashinfer
