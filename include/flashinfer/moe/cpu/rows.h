// SPDX-License-Identifier: Apache-2.0
// Rows of fp32 as operands of products on the CPU: rounding and quantisation, and the activations between products.
#pragma once
#include <algorithm>

#include "../../cpu/vec.h"
#include "../layer.h"
#include "../swiglu.h"
#include "../../gemm/cpu/pack.h"

namespace flashinfer {
namespace fused_moe {

using cpu::LANES;
using cpu::Vec;

inline float Amax(const float* x, int64_t n) {
  Vec most{};
  cpu::ForEachVec(n, [&](int64_t i, auto lanes) {
    const Vec magnitude = cpu::BitCast<Vec>(cpu::BitCast<cpu::UintVec>(cpu::Load(x + i, lanes)) & 0x7FFFFFFFu);
    most = magnitude > most ? magnitude : most;
  });
  float lane[LANES], amax = 0.f;
  cpu::Store(lane, most);
  for (const float value : lane) amax = std::max(amax, value);
  return amax;
}

/// Write e4m3(x * q) with q = 448 / amax, or 1 where amax is 0, and return 1 / q.
inline float QuantizeByAmax(const float* x, int64_t n, float8_e4m3_t* codes) {
  const float amax = Amax(x, n), q = amax == 0.f ? 1.f : 448.f / amax;
  cpu::ForEachVec(n, [&](int64_t i, auto lanes) { cpu::Store(codes + i, cpu::Load(x + i, lanes) * q, lanes); });
  return 1.f / q;
}

/// Write a row of an operand. `x` is overwritten.
inline void WriteRow(const Operand& to, int64_t row, int32_t expert, float* x) {
  constexpr int64_t BLOCK = 128;
  const int64_t n = to.columns;
  if (to.rounding == Rounding::kElement) {
    gemm::WithElement(to.element, [&](auto type) {
      using T = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
      T* out = static_cast<T*>(to.data) + row * n;
      cpu::ForEachVec(n, [&](int64_t i, auto lanes) { cpu::Store(out + i, cpu::Load(x + i, lanes), lanes); });
    });
    return;
  }
  auto* codes = static_cast<float8_e4m3_t*>(to.data) + row * n;
  if (to.rounding == Rounding::kRows) {
    to.scales[row] = QuantizeByAmax(x, n, codes);
  } else if (to.rounding == Rounding::kBlocks) {
    cpu::ForEachVec(
        n, [&](int64_t i, auto lanes) { cpu::Store(x + i, cpu::Round<bfloat16_t>(cpu::Load(x + i, lanes)), lanes); });
    for (int64_t i = 0; i < n; i += BLOCK) {
      to.scales[i / BLOCK * to.scale_stride + row] = QuantizeByAmax(x + i, std::min(BLOCK, n - i), codes + i);
    }
  } else {
    const bool by_column = to.rounding == Rounding::kColumns && to.column_factors != nullptr;
    const float factor = to.rounding == Rounding::kFactor ? to.factor[to.is_factor_of_expert ? expert : 0] : 1.f;
    cpu::ForEachVec(n, [&](int64_t i, auto lanes) {
      Vec y = cpu::Load(x + i, lanes) * factor;
      if (by_column) y *= cpu::Load(to.column_factors + i, lanes);
      cpu::Store(codes + i, y, lanes);
    });
  }
}

/// Read columns [begin, begin + n) of a row of sums as values: times its factors, plus the bias of its expert.
inline void ReadSums(const Sums& from, int64_t row, int32_t expert, int64_t begin, int64_t n, float* to) {
  float factor = from.expert_factor == nullptr ? 1.f : from.expert_factor[expert];
  if (from.row_factor != nullptr) factor *= from.row_factor[row];
  gemm::WithElement(from.element, [&](auto type) {
    const auto* x = static_cast<decltype(type)>(from.data) + row * from.columns + begin;
    cpu::ForEachVec(n, [&](int64_t i, auto lanes) { cpu::Store(to + i, cpu::Load(x + i, lanes) * factor, lanes); });
  });
  if (from.bias == nullptr) return;
  gemm::WithElement(from.bias_element, [&](auto type) {
    const auto* x = static_cast<decltype(type)>(from.bias) + expert * from.columns + begin;
    cpu::ForEachVec(n, [&](int64_t i, auto lanes) {
      cpu::Store(to + i, cpu::Load(to + i, lanes) + cpu::Load(x + i, lanes), lanes);
    });
  });
}

/// Overwrite `gate` with the activation of n gates (and n values of `up`, if it is gated).
inline void ActivateRow(const ActivationParams& p, int32_t expert, int64_t n, float* gate, const float* up) {
  const ActivationConstants constants = ConstantsOf(p, expert);
  const Vec a = cpu::Broadcast(constants.a), b = cpu::Broadcast(constants.b), limit = cpu::Broadcast(constants.limit);
  const auto apply = [&](const auto& f) {
    cpu::ForEachVec(n, [&](int64_t i, auto lanes) {
      const Vec u = up == nullptr ? Vec{} : cpu::Load(up + i, lanes);
      cpu::Store(gate + i, f(cpu::Load(gate + i, lanes), u), lanes);
    });
  };
  switch (p.type) {
    case ActivationType::kGelu:
      return apply([](const Vec& g, const Vec&) { return cpu::Activate<Activation::kGelu>(g); });
    case ActivationType::kRelu:
      return apply([](const Vec& g, const Vec&) { return g < 0.f ? Vec{} : g; });
    case ActivationType::kSilu:
      return apply([](const Vec& g, const Vec&) { return cpu::Activate<Activation::kSilu>(g); });
    case ActivationType::kSwiglu:
      return apply([](const Vec& g, const Vec& u) { return Swiglu(g, u); });
    case ActivationType::kGeglu:
      return apply([](const Vec& g, const Vec& u) { return cpu::Activate<Activation::kGelu>(g) * u; });
    case ActivationType::kGegluTanh:
      return apply([](const Vec& g, const Vec& u) { return cpu::Activate<Activation::kGeluTanh>(g) * u; });
    case ActivationType::kRelu2:
      return apply([](const Vec& g, const Vec&) {
        const Vec positive = g < 0.f ? Vec{} : g;  // squared, not times g: that is NaN where g is -inf
        return positive * positive;
      });
    case ActivationType::kIdentity:
      return;
    case ActivationType::kSwigluBias:
      return apply([=](const Vec& g, const Vec& u) { return Swiglu(g, u, a, b, limit); });
    case ActivationType::kSwigluStep:
      return apply([=](const Vec& g, const Vec& u) { return SwigluStep(g, u, limit); });
    case ActivationType::kSitu:
      return apply([=](const Vec& g, const Vec& u) { return Situ(g, u, a, b); });
  }
}

}  // namespace fused_moe
}  // namespace flashinfer
