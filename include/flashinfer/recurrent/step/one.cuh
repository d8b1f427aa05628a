// SPDX-License-Identifier: Apache-2.0
// The step kernel for one token of each sequence. Bound by the bytes of the states, and by latency for small batches:
// a warp shares nothing with others and waits for memory twice, for its slot and for everything else at once.
//
//   grid    (tiles of rows, value heads, sequences)
//   block   4 warps; TILE = 16 * ROWS rows of one head      warp   4 groups of 8 lanes     group   ROWS rows
//
//        slot ---> ROWS rows of the state ------------------------.
//        k, q (16 channels of 128 in each of the 8 lanes), v  ----+--> s.k, s.q, shuffle, u = beta (v - s.k)
//        gates; KDA: a group computes a fourth of the decays -----'    s <- decay s + u k^T,  o = s.q + u (k.q)
//
// Rows are kept as they are stored and converted where they are used, which leaves registers for more warps.
//   test  pytest tests/recurrent/test_gdn_decode.py      bench  python benchmarks/bench_recurrent.py
#pragma once
#include "../../ptx/pdl.cuh"
#include "numbers.cuh"
#include "shape.h"
#include "stage.cuh"

namespace flashinfer {
namespace recurrent {
namespace step {

/// Sum over the lanes of a row.
__device__ __forceinline__ float RowSum(float x) {
#pragma unroll
  for (int offset = COLUMNS / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/// The channels of one lane: i-th part of VEC neighbours at channel (i * COLUMNS + column) * VEC.
template <typename T, int ELEMENTS, int VEC>
struct Channels {
  static constexpr int PARTS = ELEMENTS / VEC, WIDTH = VEC * int(sizeof(T)) > 16 ? 16 / int(sizeof(T)) : VEC;
  Vec<T, WIDTH> part[ELEMENTS / WIDTH];

  __device__ __forceinline__ void Load(const T* row, int column) {
#pragma unroll
    for (int i = 0; i < ELEMENTS / WIDTH; ++i) {
      const int e = i * WIDTH;
      part[i] = Vec<T, WIDTH>::Load(row + (e / VEC * COLUMNS + column) * VEC + e % VEC);
    }
  }
  __device__ __forceinline__ float operator[](int e) const { return part[e / WIDTH].Float(e % WIDTH); }
};

template <typename Rule, typename T, typename S, typename Shape>
__global__ void __launch_bounds__(THREADS, Shape::BLOCKS) StepOneKernel(const __grid_constant__ StepParams p) {
  constexpr int ROWS = Shape::ROWS, ELEMENTS = Shape::ELEMENTS, VEC = 16 / sizeof(S);
  constexpr bool CHANNELS = Rule::CHANNEL_DECAY;
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int lane = threadIdx.x % 32, column = lane % COLUMNS, group = lane / COLUMNS;
  const int head = blockIdx.y, key_head = p.key_group.Divide(head);
  const int64_t n = blockIdx.z;
  const int row = blockIdx.x * Shape::TILE + threadIdx.x / 32 * (GROUPS * ROWS) + group;

  // Everything but the states, in flight at once.
  const int64_t slot = p.initial.slots.At(n), to_slot = p.final.data != nullptr ? p.final.slots.At(n) : -1;
  Channels<T, ELEMENTS, VEC> k, q;
  k.Load(static_cast<const T*>(p.k) + p.k_stride.Offset(n, 0, key_head), column);
  q.Load(static_cast<const T*>(p.q) + p.q_stride.Offset(n, 0, key_head), column);
  T v[ROWS];
  const T* values = static_cast<const T*>(p.v) + p.v_stride.Offset(n, 0, head);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) v[r] = values[min(row + r * GROUPS, int(p.value_dim) - 1)];
  RawGates gates{};
  gates.b = LoadRaw(p.b.data, p.b.stride.Offset(n, 0, head), p.b.type);
  if (p.a_log != nullptr) gates.a_log = p.a_log[head];
  constexpr int SHARE = ELEMENTS / GROUPS;  // channels whose decay this lane computes, for all four groups
  float decay[CHANNELS ? ELEMENTS : 1];
  if constexpr (CHANNELS) {
    const T* from = static_cast<const T*>(p.g) + p.g_stride.Offset(n, 0, head);
    T g[SHARE];
    uint32_t bias[SHARE];
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      const int e = group * SHARE + i, channel = (e / VEC * COLUMNS + column) * VEC + e % VEC;
      g[i] = from[channel];
      bias[i] = 0;
      if (p.dt_bias.data != nullptr) {
        bias[i] = LoadRaw(p.dt_bias.data, head * p.dt_bias.stride.head + channel, p.dt_bias.type);
      }
    }
    float own[SHARE];
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      const float x = DecodeRaw(bias[i], p.dt_bias.type);
      own[i] = Exp(Rule::LogDecay(ToFloat(g[i]), gates.a_log, x, p.gate, p.lower_bound));
    }
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) {
      decay[e] = __shfl_sync(0xffffffffu, own[e % SHARE], e / SHARE * COLUMNS + column);
    }
  } else {
    gates.a = LoadRaw(p.a.data, p.a.stride.Offset(n, 0, head), p.a.type);
    if (p.dt_bias.data != nullptr) gates.bias = LoadRaw(p.dt_bias.data, head * p.dt_bias.stride.head, p.dt_bias.type);
  }

  const int64_t out = p.out_stride.Offset(n, 0, head);
  const int own = row + column * GROUPS;  // the row whose output this lane stores
  const bool owns = column < ROWS && own < p.value_dim;
  if (slot < p.first_slot) {
    if (owns && p.zero_skipped) StoreNumber(p.out, out + own, p.out_type, 0.f);
    return;
  }
  using V = Vec<S, VEC>;
  V s[ROWS][ELEMENTS / VEC];
  const S* from = static_cast<const S*>(p.initial.data) + p.initial.Offset(slot, 0, head, row) + column * VEC;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int i = 0; i < ELEMENTS / VEC; ++i) {
      s[r][i] = V::Zero();
      if (p.initial.data != nullptr && row + r * GROUPS < p.value_dim) {
        s[r][i] = V::Load(from + r * GROUPS * p.initial.row + i * VEC * COLUMNS);
      }
    }
  }

  float kk = 0.f, qq = 0.f, kq = 0.f;
#pragma unroll
  for (int e = 0; e < ELEMENTS; ++e) kk += k[e] * k[e], qq += q[e] * q[e], kq += k[e] * q[e];
  kk = RowSum(kk), qq = RowSum(qq), kq = RowSum(kq);
  const float k_factor = p.normalise ? rsqrtf(kk + 1e-6f) : 1.f;
  const float q_factor = (p.normalise ? rsqrtf(qq + 1e-6f) : 1.f) * p.scale;
  const float b = DecodeRaw(gates.b, p.b.type), beta = p.beta_is_logit ? Sigmoid(b) : b;
  if constexpr (!CHANNELS) {
    const float a = DecodeRaw(gates.a, p.a.type), bias = DecodeRaw(gates.bias, p.dt_bias.type);
    decay[0] = Exp(Rule::LogDecay(a, gates.a_log, bias, p.softplus_beta, p.softplus_threshold));
  }

  // A channel of k and q is converted once for all rows. One decay of a head is a factor of the sums.
  float sk[ROWS] = {}, sq[ROWS] = {}, u[ROWS], o = 0.f;
#pragma unroll
  for (int e = 0; e < ELEMENTS; ++e) {
    const float k_e = k[e], q_e = q[e];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float x = s[r][e / VEC].Float(e % VEC);
      if constexpr (CHANNELS) x *= decay[e];
      sk[r] += x * k_e;
      sq[r] += x * q_e;
    }
  }
  const float sum_decay = CHANNELS ? 1.f : decay[0];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    sk[r] = RowSum(sk[r]), sq[r] = RowSum(sq[r]);
    u[r] = k_factor * Rule::Correction(ToFloat(v[r]), sk[r] * (k_factor * sum_decay), beta);
    const float out_r = q_factor * (sq[r] * sum_decay + u[r] * kq);
    o = column == r ? out_r : o;
  }
  if (owns) StoreNumber(p.out, out + own, p.out_type, o);
  if (to_slot < p.first_slot) return;
  S* to = static_cast<S*>(p.final.data) + p.final.Offset(to_slot, 0, head, row) + column * VEC;
#pragma unroll
  for (int i = 0; i < ELEMENTS / VEC; ++i) {
    float k_i[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) k_i[j] = k[i * VEC + j];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (row + r * GROUPS >= p.value_dim) continue;
      float x[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) x[j] = s[r][i].Float(j) * decay[CHANNELS ? i * VEC + j : 0] + u[r] * k_i[j];
      RoundTo<S, VEC>(x).Store(to + r * GROUPS * p.final.row + i * VEC * COLUMNS);
    }
  }
}

}  // namespace step
}  // namespace recurrent
}  // namespace flashinfer
