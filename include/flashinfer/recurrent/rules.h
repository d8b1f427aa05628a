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

FLASHINFER_HD float Sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

/// log(1 + e^(beta x)) / beta; above the threshold, where the difference is below the precision of a float, x itself.
FLASHINFER_HD float Softplus(float x, float beta = 1.f, float threshold = 20.f) {
  return x * beta <= threshold ? log1pf(expf(x * beta)) / beta : x;
}

/// Gated delta rule (GDN): one decay per value head.
struct GatedDeltaRule {
  static constexpr bool CHANNEL_DECAY = false;
  static constexpr bool READS_STATE = true;  ///< Correction needs dot(s, k)

  /// Log decay from the projection `a` of a token and the head's parameters.
  FLASHINFER_HD static float LogDecay(float a, float a_log, float dt_bias, float beta, float threshold) {
    return -expf(a_log) * Softplus(a + dt_bias, beta, threshold);
  }
  FLASHINFER_HD static float Correction(float v, float state_k, float beta) { return beta * (v - state_k); }
};

/// Kimi delta attention (KDA): the delta rule with one decay per key channel.
struct KimiDeltaRule {
  static constexpr bool CHANNEL_DECAY = true;
  static constexpr bool READS_STATE = true;

  /// How a kernel gets the log decay of a channel from `g`.
  enum class Gate : int {
    kLogDecay,  ///< g is the log decay
    kSoftplus,  ///< -e^(a_log) softplus(g + dt_bias), without a bound
    kBounded,   ///< lower_bound * sigmoid(e^(a_log) (g + dt_bias)), at least lower_bound
  };
  FLASHINFER_HD static float LogDecay(float g, float a_log, float dt_bias, Gate gate, float lower_bound) {
    if (gate == Gate::kLogDecay) return g;
    const float x = g + dt_bias;
    if (gate == Gate::kSoftplus) return -expf(a_log) * Softplus(x);
    return lower_bound * Sigmoid(expf(a_log) * x);
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
