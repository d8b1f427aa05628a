// SPDX-License-Identifier: Apache-2.0
// Tokens into shared memory: a warp takes a token, normalises k and q and computes decay and beta once for all rows of
// the block. What a verification records of its tokens is written here too.
#pragma once
#include "../../warp.cuh"
#include "numbers.cuh"
#include "shape.h"

namespace flashinfer {
namespace recurrent {
namespace step {

/// Place of a block: one head of one sequence, rows [first_row, first_row + TILE).
struct Place {
  Range range;
  int64_t n, slot;
  int head, key_head, first_row;
  bool leads_head, leads_key_head;  ///< this block writes what is kept once for the value head, for the key head
};

/// Numbers of one token and head, loaded but not looked at: a conversion would wait for each load before the next.
struct RawGates {
  uint32_t a, b, bias;
  float a_log;
};

template <typename Rule>
__device__ __forceinline__ RawGates LoadGates(const StepParams& p, const Place& at, int64_t token) {
  RawGates raw{};
  raw.b = LoadRaw(p.b.data, p.b.stride.Offset(at.range.sequence, token, at.head), p.b.type);
  if (p.a_log != nullptr) raw.a_log = p.a_log[at.head];
  if constexpr (!Rule::CHANNEL_DECAY) {
    raw.a = LoadRaw(p.a.data, p.a.stride.Offset(at.range.sequence, token, at.head), p.a.type);
    if (p.dt_bias.data != nullptr) raw.bias = LoadRaw(p.dt_bias.data, at.head * p.dt_bias.stride.head, p.dt_bias.type);
  }
  return raw;
}

/// Log decay of rules with one decay per head.
template <typename Rule>
__device__ __forceinline__ float LogDecayOf(const StepParams& p, const RawGates& raw) {
  const float a = DecodeRaw(raw.a, p.a.type);
  if (p.form == GateForm::kGiven) return a;
  return Rule::LogDecay(a, raw.a_log, DecodeRaw(raw.bias, p.dt_bias.type), p.softplus_beta, p.softplus_threshold);
}

__device__ __forceinline__ float BetaOf(const StepParams& p, const RawGates& raw) {
  const float b = DecodeRaw(raw.b, p.b.type);
  return p.beta_is_logit ? Sigmoid(b) : b;
}

/// Write four channels of the raw key and, for rules with gates in the recording, of the raw gate.
template <int K>
__device__ __forceinline__ void RecordChannels(const StepParams& p, const Place& at, int64_t t, int e,
                                               const float (&k)[4], const float (&g)[4]) {
  const bool of_value_head = p.record.gates;
  if (p.record.keys == nullptr || !(of_value_head ? at.leads_head : at.leads_key_head)) return;
  const int64_t width = of_value_head ? 2 * K : K, head = of_value_head ? at.head : at.key_head;
  auto* to =
      static_cast<__nv_bfloat16*>(p.record.keys) + at.slot * p.record.key_slot + (head * p.tokens + t) * width + e;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[i] = FromFloat<__nv_bfloat16>(k[i]);
    if (of_value_head) to[K + i] = FromFloat<__nv_bfloat16>(g[i]);
  }
}

/// Prepare token t of the sequence in row i of the shared memory; called by all lanes of one warp.
template <typename Rule, typename T, typename S, typename Shape>
__device__ __forceinline__ void StageToken(const StepParams& p, const Place& at, int64_t t, int i,
                                           Shared<Rule, Shape>& shared) {
  constexpr int K = Shape::K, PARTS = (K / 4 + 31) / 32, VEC = 16 / sizeof(S);
  constexpr bool ANY = Shape::FORM == Form::kAny;
  const int lane = threadIdx.x % 32;
  const int64_t token = at.range.first + t, sequence = at.range.sequence;
  const bool is_vectorised = !ANY || p.is_vectorised, has_q = p.out != nullptr;
  const T* k_row = static_cast<const T*>(p.k) + p.k_stride.Offset(sequence, token, at.key_head);
  const T* q_row = static_cast<const T*>(p.q) + p.q_stride.Offset(sequence, token, at.key_head);

  // Everything is loaded before anything is used.
  using V4 = Vec<T, 4>;
  V4 raw_k[PARTS], raw_q[PARTS], raw_g[PARTS];
  uint32_t bias[PARTS][4];
  const RawGates gates = LoadGates<Rule>(p, at, token);
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const int e = (part * 32 + lane) * 4;
    const bool inside = e < K;
    raw_k[part] = inside ? LoadSome<T, 4>(k_row + e, is_vectorised) : V4::Zero();
    raw_q[part] = inside && has_q ? LoadSome<T, 4>(q_row + e, is_vectorised) : V4::Zero();
    raw_g[part] = V4::Zero();
    if constexpr (Rule::CHANNEL_DECAY) {
      const T* g_row = static_cast<const T*>(p.g) + p.g_stride.Offset(sequence, token, at.head);
      if (inside) raw_g[part] = LoadSome<T, 4>(g_row + e, is_vectorised);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        bias[part][j] = 0;
        if (inside && p.dt_bias.data != nullptr) {
          bias[part][j] = LoadRaw(p.dt_bias.data, at.head * p.dt_bias.stride.head + e + j, p.dt_bias.type);
        }
      }
    }
  }

  float k[PARTS][4], q[PARTS][4], g[PARTS][4], kk = 0.f, qq = 0.f, kq = 0.f;
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const int e = (part * 32 + lane) * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      k[part][j] = raw_k[part].Float(j), q[part][j] = raw_q[part].Float(j), g[part][j] = raw_g[part].Float(j);
      kk += k[part][j] * k[part][j];
      qq += q[part][j] * q[part][j];
      kq += k[part][j] * q[part][j];
    }
    if (ANY && e < K) RecordChannels<K>(p, at, t, e, k[part], g[part]);
  }
  const float beta = BetaOf(p, gates);
  float log_decay = 0.f;
  if constexpr (!Rule::CHANNEL_DECAY) {
    log_decay = LogDecayOf<Rule>(p, gates);
    if (lane == 0) shared.decay[i][0] = Exp(log_decay), shared.log_decay[i] = log_decay;
  }
  kk = WarpSum(kk), qq = WarpSum(qq), kq = WarpSum(kq);
  const float k_factor = p.normalise ? rsqrtf(kk + 1e-6f) : 1.f;
  const float q_factor = (p.normalise ? rsqrtf(qq + 1e-6f) : 1.f) * p.scale;
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const int e = (part * 32 + lane) * 4;
    if (e >= K) continue;
    const int position = Position<VEC>(e);  // four neighbours stay neighbours
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      shared.k[i][position + j] = k[part][j] * k_factor;
      shared.q[i][position + j] = q[part][j] * q_factor;
    }
    if constexpr (Rule::CHANNEL_DECAY) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = DecodeRaw(bias[part][j], p.dt_bias.type);
        shared.decay[i][position + j] = Exp(Rule::LogDecay(g[part][j], gates.a_log, x, p.gate, p.lower_bound));
      }
    }
    if constexpr (ANY) {
      if (at.leads_key_head && p.ring.k != nullptr) {
        const int64_t row = (p.ring.bases.data != nullptr ? p.ring.bases.At(at.n) : 0) + p.ring.lengths.At(at.n) + t;
        const int64_t to = at.slot * p.ring.k_slot + (at.key_head * p.ring.rows + row % p.ring.rows) * K + e;
#pragma unroll
        for (int j = 0; j < 4; ++j) StoreNumber(p.ring.k, to + j, p.ring.type, k[part][j] * k_factor);
      }
    }
  }
  if (lane == 0) {
    shared.beta[i] = beta;
    shared.kq[i] = kq * k_factor * q_factor;
    if (ANY && at.leads_head && p.record.betas != nullptr) {
      const int64_t to = at.slot * p.record.number_slot + at.head * p.tokens + t;
      p.record.betas[to] = beta;
      p.record.log_decays[to] = log_decay;
    }
  }
}

/// Stage tokens [begin, begin + count) with their values of the block's rows; called by all threads.
template <typename Rule, typename T, typename S, typename Shape>
__device__ __forceinline__ void Stage(const StepParams& p, const Place& at, int64_t begin, int count,
                                      Shared<Rule, Shape>& shared) {
  constexpr bool ANY = Shape::FORM == Form::kAny;
  constexpr int VALUES = Shape::TOKENS * Shape::TILE / THREADS;  // values per thread
  T v[VALUES];
#pragma unroll
  for (int j = 0; j < VALUES; ++j) {
    const int i = threadIdx.x + j * THREADS, token = i / Shape::TILE, row = at.first_row + i % Shape::TILE;
    const int64_t from = p.v_stride.Offset(at.range.sequence, at.range.first + begin + token, at.head) + row;
    if (token < count && row < p.value_dim) v[j] = static_cast<const T*>(p.v)[from];
  }
  for (int i = threadIdx.x / 32; i < count; i += WARPS) StageToken<Rule, T, S>(p, at, begin + i, i, shared);
#pragma unroll
  for (int j = 0; j < VALUES; ++j) {
    const int i = threadIdx.x + j * THREADS, token = i / Shape::TILE, row = at.first_row + i % Shape::TILE;
    if (token >= count || row >= p.value_dim) continue;
    const float x = ToFloat(v[j]);
    shared.v[token][i % Shape::TILE] = x;
    if (ANY && p.record.values != nullptr) {
      static_cast<__nv_bfloat16*>(
          p.record.values)[at.slot * p.record.value_slot + (at.head * p.tokens + begin + token) * p.value_dim + row] =
          FromFloat<__nv_bfloat16>(x);
    }
  }
}

}  // namespace step
}  // namespace recurrent
}  // namespace flashinfer
