// SPDX-License-Identifier: Apache-2.0
// Vectors of elements in registers: wide loads and stores, conversion to and from float.
//   Vec<T, N>       N elements, aligned to the size of the whole vector (at most 16 bytes)
//   Vec<int8_t, N>  the same with constructors: N values, a pointer, or the word that holds all
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace flashinfer {

/// Unsigned type that loads and stores BYTES at once.
template <int BYTES>
struct Word;
template <>
struct Word<16> {
  using type = uint4;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<1> {
  using type = uint8_t;
};

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float ToFloat(int8_t x) { return float(x); }

template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  using Bits = typename Word<sizeof(T) * N>::type;
  T data[N];

  __device__ __forceinline__ T& operator[](int i) { return data[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return data[i]; }

  /// Return element i as a float. The upper bfloat16 of a register is a float after the lower half is masked: one
  /// instruction instead of two.
  __device__ __forceinline__ float Float(int i) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
      if (i % 2 == 1) return __uint_as_float(reinterpret_cast<const uint32_t*>(data)[i / 2] & 0xffff0000u);
    }
    return ToFloat(data[i]);
  }

  __device__ __forceinline__ static Vec Load(const T* p) {
    Vec v;
    *reinterpret_cast<Bits*>(&v) = *reinterpret_cast<const Bits*>(p);
    return v;
  }
  __device__ __forceinline__ void Store(T* p) const {
    *reinterpret_cast<Bits*>(p) = *reinterpret_cast<const Bits*>(this);
  }
  __device__ __forceinline__ static Vec Zero() {
    Vec v;
    *reinterpret_cast<Bits*>(&v) = Bits{};
    return v;
  }
};

/// N signed bytes. Kernels of quantised operators build one from what they have at hand: values (`{1, -2, 3, -4}`),
/// a pointer aligned to N bytes, or the word another vector type holds (`Bits`). A vector of four is a `char4` and a
/// `float4` where one is asked for.
template <int N>
struct alignas(N) Vec<int8_t, N> {
  using Bits = typename Word<N>::type;
  int8_t data[N];

  Vec() = default;
  template <typename... Values, typename = std::enable_if_t<(N > 1) && sizeof...(Values) == N>>
  __host__ __device__ __forceinline__ Vec(Values... values) : data{static_cast<int8_t>(values)...} {}
  __host__ __device__ __forceinline__ explicit Vec(const int8_t* p) {
    *reinterpret_cast<Bits*>(this) = *reinterpret_cast<const Bits*>(p);
  }
  __host__ __device__ __forceinline__ explicit Vec(Bits bits) { *reinterpret_cast<Bits*>(this) = bits; }
  template <int M = N, typename = std::enable_if_t<M == 4>>
  __host__ __device__ __forceinline__ Vec(char4 v) : Vec(v.x, v.y, v.z, v.w) {}

  __host__ __device__ __forceinline__ int8_t& operator[](int i) { return data[i]; }
  __host__ __device__ __forceinline__ const int8_t& operator[](int i) const { return data[i]; }

  __host__ __device__ __forceinline__ float Float(int i) const { return float(data[i]); }
  __host__ __device__ __forceinline__ void ToFloats(float (&x)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = Float(i);
  }
  template <int M = N, typename = std::enable_if_t<M == 4>>
  __host__ __device__ __forceinline__ operator float4() const {
    return make_float4(Float(0), Float(1), Float(2), Float(3));
  }
  template <int M = N, typename = std::enable_if_t<M == 4>>
  __host__ __device__ __forceinline__ operator char4() const {
    return make_char4(data[0], data[1], data[2], data[3]);
  }

  __device__ __forceinline__ static Vec Load(const int8_t* p) { return Vec(p); }
  __device__ __forceinline__ void Store(int8_t* p) const {
    *reinterpret_cast<Bits*>(p) = *reinterpret_cast<const Bits*>(this);
  }
  __device__ __forceinline__ static Vec Zero() { return Vec(Bits{}); }
};

template <typename T, int N>
using vec_t = Vec<T, N>;

template <typename T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
/// Round to nearest even and saturate to [-128, 127]; NaN becomes 0.
template <>
__device__ __forceinline__ int8_t FromFloat<int8_t>(float x) {
  return int8_t(max(-128, min(127, __float2int_rn(x))));
}

/// Load N floats, four at a time if N is a multiple of four (`p` is then 16-byte aligned).
template <int N>
__device__ __forceinline__ void LoadFloats(const float* p, float (&x)[N]) {
  constexpr int WIDTH = N % 4 == 0 ? 4 : 1;
#pragma unroll
  for (int i = 0; i < N; i += WIDTH) {
    const auto part = Vec<float, WIDTH>::Load(p + i);
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) x[i + j] = part[j];
  }
}

/// Round N floats to T; pairs convert in one instruction where the chip has it.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> RoundTo(const float (&x)[N]) {
  Vec<T, N> out;
  if constexpr (N % 2 == 0 && sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      if constexpr (std::is_same_v<T, __half>) {
        *reinterpret_cast<__half2*>(&out.data[i]) = __floats2half2_rn(x[i], x[i + 1]);
      } else {
        *reinterpret_cast<__nv_bfloat162*>(&out.data[i]) = __floats2bfloat162_rn(x[i], x[i + 1]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out.data[i] = FromFloat<T>(x[i]);
  }
  return out;
}

/// Convert two floats to fp8, the first in the low byte.
__device__ __forceinline__ uint32_t Fp8Pair(float low, float high, __nv_fp8_interpretation_t kind) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, kind);
}

/// Saturate N floats to fp8 (448 or 57344) with round-to-nearest-even and write them; p is aligned to N bytes. NaN
/// stays NaN. Words are put together here: a vector of bytes the compiler takes apart, three instructions per element.
template <int N>
__device__ __forceinline__ void StoreFp8(uint8_t* p, const float (&x)[N], __nv_fp8_interpretation_t kind) {
  if constexpr (N % 4 == 0) {
    Vec<uint32_t, N / 4> words;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      words[i / 4] = Fp8Pair(x[i], x[i + 1], kind) | Fp8Pair(x[i + 2], x[i + 3], kind) << 16;
    }
    words.Store(reinterpret_cast<uint32_t*>(p));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) p[i] = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, kind);
  }
}

}  // namespace flashinfer
