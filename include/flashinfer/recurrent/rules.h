// SPDX-License-Identifier: Apache-2.0
// Rules of recurrent layers: how one token changes a row s of the state (channel v of a value head, K elements):
//
//   s[i] *= e^(log decay)                  one decay per head, or one per key channel (CHANNEL_DECAY)
//   u     = Correction(v, dot(s, k), beta)
//   s[i] += u * k[i]
//   o     = dot(s, q)
//
// A rule is a struct with these hooks; kernels that go token by token (step/, cpu/) are templates over it. All
// arithmetic is fp32. The float64 references are in flashinfer/trace/templates/recurrent_rules.py.
//   test  pytest tests/recurrent
#pragma once
#include <cmath>

#include "../host_device.h"

namespace flashinfer {
namespace recurrent {

// On the device a few instructions each, to 2 ulp of the result and 1e-7 of one: they are a part of every token.
#ifdef __CUDA_ARCH__
FLASHINFER_HD float Exp(float x) { return __expf(x); }
FLASHINFER_HD float LogOnePlus(float x) { return __logf(1.f + x); }
FLASHINFER_HD float Quotient(float x, float y) { return __fdividef(x, y); }
#else
FLASHINFER_HD float Exp(float x) { return expf(x); }
FLASHINFER_HD float LogOnePlus(float x) { return log1pf(x); }
FLASHINFER_HD float Quotient(float x, float y) { return x / y; }
#endif

/// Below -80 the device's quotient would be 1 / infinity's neighbour, which it takes for 0.
FLASHINFER_HD float Sigmoid(float x) { return Quotient(1.f, 1.f + Exp(x < -80.f ? 80.f : -x)); }

/// log(1 + e^(beta x)) / beta; above the threshold, where the difference is below the precision of a float, x itself.
FLASHINFER_HD float Softplus(float x, float beta = 1.f, float threshold = 20.f) {
  return x * beta <= threshold ? Quotient(LogOnePlus(Exp(x * beta)), beta) : x;
}

/// Gated delta rule (GDN): one decay per value head.
struct GatedDeltaRule {
  static constexpr bool CHANNEL_DECAY = false;
  static constexpr bool READS_STATE = true;  ///< Correction needs dot(s, k)

  /// Log decay from the projection `a` of a token and the head's parameters.
  FLASHINFER_HD static float LogDecay(float a, float a_log, float dt_bias, float beta, float threshold) {
    return -Exp(a_log) * Softplus(a + dt_bias, beta, threshold);
  }
  FLASHINFER_HD static float Correction(float v, float state_k, float beta) { return beta * (v - state_k); }
};

/// Kimi delta attention (KDA): the delta rule with one decay per key channel.
struct KimiDeltaRule {
  static constexpr bool CHANNEL_DECAY = true;
  static constexpr bool READS_STATE = true;

  /// Form of `g`, from which a kernel gets the log decay of a channel.
  enum class Gate : int {
    kLogDecay,  ///< g is the log decay
    kSoftplus,  ///< -e^(a_log) softplus(g + dt_bias), without a bound
    kBounded,   ///< lower_bound * sigmoid(e^(a_log) (g + dt_bias)), at least lower_bound
  };
  FLASHINFER_HD static float LogDecay(float g, float a_log, float dt_bias, Gate gate, float lower_bound) {
    if (gate == Gate::kLogDecay) return g;
    const float x = g + dt_bias;
    if (gate == Gate::kSoftplus) return -Exp(a_log) * Softplus(x);
    return lower_bound * Sigmoid(Exp(a_log) * x);
  }
  FLASHINFER_HD static float Correction(float v, float state_k, float beta) { return beta * (v - state_k); }
};

/// Mamba-2 (SSD): k is B, q is C, v is x and beta is dt; what is added does not depend on the state.
struct Mamba2Rule {
  static constexpr bool CHANNEL_DECAY = false;
  static constexpr bool READS_STATE = false;

  FLASHINFER_HD static float LogDecay(float dt, float a) { return dt * a; }
  FLASHINFER_HD static float Correction(float x, float, float dt) { return dt * x; }
};

}  // namespace recurrent
}  // namespace flashinfer
