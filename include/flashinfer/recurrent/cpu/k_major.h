// SPDX-License-Identifier: Apache-2.0
// K-major decode (k_major.h) on the CPU: a thread takes whole heads, and goes twice through the key channels of each.
//   test  pytest tests/recurrent
#pragma once
#include "../k_major.h"
#include "step.h"

namespace flashinfer {
namespace recurrent {

template <typename T>
Status KMajorStep(const StepParams& p, Stream) {
  namespace c = flashinfer::cpu;
  const int64_t K = p.key_dim, V = p.value_dim;
  c::ParallelFor(p.sequences * p.value_heads, K * V, [&](int64_t begin, int64_t end) {
    const c::Scratch sk(V), sq(V), k(K), q(K);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = i / p.value_heads, head = i % p.value_heads, key_head = head / (p.value_heads / p.key_heads);
      const T* k_row = static_cast<const T*>(p.k) + p.k_stride.Offset(n, 0, key_head);
      const T* q_row = static_cast<const T*>(p.q) + p.q_stride.Offset(n, 0, key_head);
      for (int64_t j = 0; j < K; ++j) k[j] = float(k_row[j]), q[j] = float(q_row[j]);
      const auto factor = [&](const c::Scratch& x) {
        return p.normalise ? 1.f / std::sqrt(cpu_step::Dot(&x[0], &x[0], K) + 1e-6f) : 1.f;
      };
      const float k_factor = factor(k), q_factor = factor(q) * p.scale;
      for (int64_t j = 0; j < K; ++j) k[j] *= k_factor, q[j] *= q_factor;
      const float kq = cpu_step::Dot(&k[0], &q[0], K);
      const auto number = [&](const Numbers& x) {
        return cpu_step::LoadNumber(x.data, x.stride.Offset(n, 0, head), x.type);
      };
      const float bias = cpu_step::LoadNumber(p.dt_bias.data, head * p.dt_bias.stride.head, p.dt_bias.type);
      const float decay =
          std::exp(GatedDeltaRule::LogDecay(number(p.a), p.a_log[head], bias, p.softplus_beta, p.softplus_threshold));
      const float beta = Sigmoid(number(p.b));
      float* state = static_cast<float*>(p.initial.data) + p.initial.Offset(n, 0, head, 0);
      std::fill_n(&sk[0], V, 0.f);
      std::fill_n(&sq[0], V, 0.f);
      for (int64_t j = 0; j < K; ++j) {
        float* row = state + j * p.initial.row;
        c::ForEachVec(V, [&](int64_t at, auto lanes) {
          const c::Vec s = c::Load(row + at, lanes) * decay;
          c::Store(row + at, s, lanes);
          c::Store(&sk[at], c::Load(&sk[at], lanes) + s * k[j], lanes);
          c::Store(&sq[at], c::Load(&sq[at], lanes) + s * q[j], lanes);
        });
      }
      const T* v = static_cast<const T*>(p.v) + p.v_stride.Offset(n, 0, head);
      const int64_t out = p.out_stride.Offset(n, 0, head);
      for (int64_t at = 0; at < V; ++at) {
        sk[at] = GatedDeltaRule::Correction(float(v[at]), sk[at], beta);
        cpu_step::StoreNumber(p.out, out + at, p.out_type, sq[at] + sk[at] * kq);
      }
      for (int64_t j = 0; j < K; ++j) {
        float* row = state + j * p.initial.row;
        c::ForEachVec(V, [&](int64_t at, auto lanes) {
          c::Store(row + at, c::Load(row + at, lanes) + c::Load(&sk[at], lanes) * k[j], lanes);
        });
      }
    }
  });
  return 0;
}

}  // namespace recurrent
}  // namespace flashinfer
