// SPDX-License-Identifier: Apache-2.0
// Rows of a Mamba-2 state between global memory and the registers of a warp.
// LANES lanes hold a row of up to LANES * CHUNKS * VEC numbers: chunk c of lane l begins at column (c * LANES + l) * VEC, so
// that the lanes of a row read neighbouring vectors of 16 bytes (8 of one-byte types).
#pragma once
#include <cuda_fp8.h>

#include <type_traits>

#include "../../utils.cuh"
#include "../../vec_dtypes.cuh"
#include "../arrays.h"
#include "../reduce_rows.cuh"
#include "../round.h"
#include "../weights.cuh"

namespace flashinfer {
namespace recurrent {

/// Storage of numbers of a type in a state.
template <typename State>
struct StateFormat {
  static constexpr bool IS_SCALED = false;
  static constexpr float MAX = 0.f;
};
template <>
struct StateFormat<int16_t> {
  static constexpr bool IS_SCALED = true;
  static constexpr float MAX = 32767.f;
};
template <>
struct StateFormat<int8_t> {
  static constexpr bool IS_SCALED = true;
  static constexpr float MAX = 127.f;
};
template <>
struct StateFormat<__nv_fp8_e4m3> {
  static constexpr bool IS_SCALED = true;
  static constexpr float MAX = 448.f;
};

__device__ __forceinline__ float StateToFloat(float x) { return x; }
__device__ __forceinline__ float StateToFloat(__half x) { return __half2float(x); }
__device__ __forceinline__ float StateToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float StateToFloat(int16_t x) { return float(x); }
__device__ __forceinline__ float StateToFloat(int8_t x) { return float(x); }
__device__ __forceinline__ float StateToFloat(__nv_fp8_e4m3 x) { return float(x); }

template <typename State>
__device__ __forceinline__ State RoundState(float x) {
  if constexpr (std::is_same_v<State, __nv_fp8_e4m3>) {
    return __nv_fp8_e4m3(x);
  } else if constexpr (std::is_integral_v<State>) {
    return State(__float2int_rn(fminf(fmaxf(x, -StateFormat<State>::MAX), StateFormat<State>::MAX)));
  } else {
    return FromFloat<State>(x);
  }
}

/// Round by random bits, for the types that have it.
template <typename State>
__device__ __forceinline__ State RoundStateBy(float x, uint32_t random) {
  State y;
  if constexpr (std::is_same_v<State, __half>) {
    y = __ushort_as_half(RoundToHalf(x, random));
  } else if constexpr (std::is_same_v<State, __nv_fp8_e4m3>) {
    y.__x = RoundToE4M3(x, random);
  } else if constexpr (std::is_same_v<State, int8_t>) {
    y = int8_t(fminf(fmaxf(RoundToInteger(x, random), -127.f), 127.f));
  } else {
    y = RoundState<State>(x);
  }
  return y;
}

/// Eight neighbouring numbers of a state, rounded by random bits. A call and not inlined: ten rounds of Philox for each number
/// of eight rows would be most of a kernel.
template <typename State>
__device__ __noinline__ typename Word<8 * sizeof(State)>::type RoundEightBy(float x0, float x1, float x2, float x3,
                                                                            float x4, float x5, float x6, float x7,
                                                                            int64_t seed, int64_t offset, int rounds) {
  const float x[8] = {x0, x1, x2, x3, x4, x5, x6, x7};
  alignas(16) State y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = RoundStateBy<State>(x[i], RandomWord(seed, offset + i, rounds));
  return *reinterpret_cast<const typename Word<8 * sizeof(State)>::type*>(y);
}

/// Read VEC numbers; lines are not kept in L1, where nothing would read them again.
template <int VEC, typename State>
struct alignas(sizeof(State) * VEC) RawVec {
  State data[VEC];
  using Bits = typename Word<sizeof(State) * VEC>::type;
  __device__ __forceinline__ void Load(const State* from) {
    *reinterpret_cast<Bits*>(this) = __ldcs(reinterpret_cast<const Bits*>(from));
  }
  __device__ __forceinline__ void Clear() { *reinterpret_cast<Bits*>(this) = Bits{}; }
  __device__ __forceinline__ void Store(State* to) const {
    __stcs(reinterpret_cast<Bits*>(to), *reinterpret_cast<const Bits*>(this));
  }
  __device__ __forceinline__ void ToFloats(float* x) const {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      if constexpr (std::is_same_v<State, __nv_bfloat16>) {  // a float is the upper half of a word
        const uint32_t word = reinterpret_cast<const uint32_t*>(data)[i / 2];
        x[i] = __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
      } else {
        x[i] = StateToFloat(data[i]);
      }
    }
  }
};

/// Shape of a warp's share of a state.
template <typename State, int WIDTH>
struct RowShape {
  static constexpr int VEC = sizeof(State) == 4 ? 4 : 8;
  static constexpr int LANES = WIDTH / VEC < 32 ? WIDTH / VEC : 32;
  static constexpr int CHUNKS = WIDTH / (LANES * VEC);
  static constexpr int ELEMENTS = VEC * CHUNKS;  // per lane
  static constexpr int GROUPS = 32 / LANES;      // rows side by side in a warp
  static constexpr int ROWS = 8;                 // per lane, one after the other in memory
  static constexpr int WARP_ROWS = ROWS * GROUPS;
  static constexpr int WARPS = 4;
  static constexpr int BLOCK_ROWS = WARPS * WARP_ROWS;
};

/// Options of a store: a seed for stochastic rounding, and where the array begins, from which positions count.
struct StoreOptions {
  bool is_random;
  int64_t seed;
  int rounds;
};

/// Store one row from the registers of its lanes. `x` is 0 beyond dstate. Every lane of the warp must take part, because
/// scales are maxima over lanes; `is_active` says whether the row is written.
template <typename State, int WIDTH>
__device__ __forceinline__ void StoreRow(const StateArray<State>& a, int64_t slot, int head, int row, int dstate,
                                         int sublane, const float (&x)[RowShape<State, WIDTH>::ELEMENTS],
                                         const StoreOptions& options, bool is_active) {
  using S = RowShape<State, WIDTH>;
  float factor = 1.f;
  if constexpr (StateFormat<State>::IS_SCALED) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < S::ELEMENTS; ++i) most = fmaxf(most, fabsf(x[i]));
#pragma unroll
    for (int mask = S::LANES / 2; mask > 0; mask /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, mask));
    factor = most == 0.f ? 1.f : StateFormat<State>::MAX / most;
    if (is_active && sublane == 0) a.scale[slot * a.scale_slot + head * a.scale_head + row] = 1.f / factor;
  }
  if (!is_active) return;
  const int64_t offset = slot * a.slot + head * a.head + row * a.row;
#pragma unroll
  for (int c = 0; c < S::CHUNKS; ++c) {
    const int column = (c * S::LANES + sublane) * S::VEC;
    if (column >= dstate) continue;
    RawVec<S::VEC, State> out;
    if constexpr (!std::is_same_v<State, float> && !std::is_same_v<State, __nv_bfloat16> &&
                  !std::is_same_v<State, int16_t>) {
      if (options.is_random) {
        float y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = x[c * S::VEC + i] * factor;
        *reinterpret_cast<typename RawVec<S::VEC, State>::Bits*>(&out) = RoundEightBy<State>(
            y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7], options.seed, offset + column, options.rounds);
        out.Store(a.data + offset + column);
        continue;
      }
    }
    if constexpr (std::is_same_v<State, __half> || std::is_same_v<State, __nv_bfloat16>) {
      float part[S::VEC];
#pragma unroll
      for (int i = 0; i < S::VEC; ++i) part[i] = x[c * S::VEC + i];
      const auto rounded = RoundTo<State, S::VEC>(part);
      *reinterpret_cast<typename RawVec<S::VEC, State>::Bits*>(&out) =
          *reinterpret_cast<const typename RawVec<S::VEC, State>::Bits*>(&rounded);
    } else {
#pragma unroll
      for (int i = 0; i < S::VEC; ++i) out.data[i] = RoundState<State>(x[c * S::VEC + i] * factor);
    }
    out.Store(a.data + offset + column);
  }
}

/// Load up to N numbers as floats, by vectors if `is_aligned` and all exist; others are 0.
template <int N, typename T>
__device__ __forceinline__ void LoadSome(const T* from, int count, bool is_aligned, float (&x)[N]) {
  constexpr int PART = 16 / sizeof(T) < N ? 16 / sizeof(T) : N;
  if (is_aligned && count >= N) {
#pragma unroll
    for (int i = 0; i < N; i += PART) {
      const auto part = Vec<T, PART>::Load(from + i);
#pragma unroll
      for (int j = 0; j < PART; ++j) x[i + j] = part.Float(j);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = i < count ? ToFloat(from[i]) : 0.f;
  }
}

}  // namespace recurrent
}  // namespace flashinfer
