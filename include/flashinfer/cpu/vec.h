// SPDX-License-Identifier: Apache-2.0
// One SIMD register of floats, and how the storage types get into it and out of it.
// Vec is a vector of the compiler's (GCC and Clang: + - * / < ?: and literals work lane by lane), as wide as the widest
// register the target has; without SIMD the same code is lowered to scalars. Only half precision, and fp8 by way of it,
// is spelled with intrinsics (x86.h): no compiler finds F16C by itself before GCC 13. (And, in top_k_bound.h, compares
// that give bits.)
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "scalar.h"
#include "x86.h"

namespace flashinfer {
namespace cpu {

#if defined(__AVX512F__)
constexpr int VEC_BYTES = 64;
#elif defined(__AVX__)
constexpr int VEC_BYTES = 32;
#else
constexpr int VEC_BYTES = 16;
#endif

constexpr int LANES = VEC_BYTES / 4;

typedef float Vec __attribute__((vector_size(VEC_BYTES)));
typedef int32_t IntVec __attribute__((vector_size(VEC_BYTES)));
typedef uint32_t UintVec __attribute__((vector_size(VEC_BYTES)));
template <typename Storage>
struct Packed {  ///< LANES stored numbers, side by side
  typedef Storage type __attribute__((vector_size(LANES * sizeof(Storage))));
};

inline Vec Broadcast(float x) { return Vec{} + x; }

/// Select lanes I from the concatenation of a and b.
template <int... I>
inline Vec Shuffle(const Vec& a, const Vec& b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, IntVec{I...});
#endif
}

inline Vec Load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

inline void Store(float* to, const Vec& v) { std::memcpy(to, &v, sizeof(v)); }

template <typename Storage>
inline UintVec Widen(const Storage* from) {
  typename Packed<Storage>::type packed;
  std::memcpy(&packed, from, sizeof(packed));
  return __builtin_convertvector(packed, UintVec);
}

#if defined(__AVX512F__)
// One instruction, which GCC 12 does not find: it widens two halves and joins them.
inline UintVec Widen(const uint16_t* from) {
  x86::Shorts packed;
  std::memcpy(&packed, from, sizeof(packed));
  return reinterpret_cast<UintVec>(x86::WidenShorts(packed));
}
#endif

template <typename Format>
inline Vec DecodeLanes(const UintVec& bits) {
  // By way of signed integers, which AVX2 can convert.
  return Decode<Format, Vec>(
      bits, [](const UintVec& value) { return __builtin_convertvector(reinterpret_cast<IntVec>(value), Vec); });
}

template <typename Format>
inline Vec Load(const SmallFloat<Format>* from) {
  return DecodeLanes<Format>(Widen(&from->bits));
}

template <typename Format>
inline void Store(SmallFloat<Format>* to, const Vec& v) {
  using PackedT = typename Packed<typename Format::Storage>::type;
  const PackedT packed = __builtin_convertvector(Encode<Format, UintVec>(v), PackedT);
  std::memcpy(to, &packed, sizeof(packed));
}

#if defined(__F16C__)
typedef uint16_t ShortVec __attribute__((vector_size(LANES * 2)));  ///< bits of half precision

inline Vec FromHalf(const ShortVec& bits) { return reinterpret_cast<Vec>(x86::FromHalf(x86::Shorts(bits))); }
inline ShortVec ToHalf(const Vec& v) { return reinterpret_cast<ShortVec>(x86::ToHalf(x86::Floats(v))); }
inline ShortVec WidenSigned(const uint8_t* from) {
  return reinterpret_cast<ShortVec>(x86::WidenBytes(x86::LoadBytes(from)));
}

inline Vec Load(const float16* from) {
  ShortVec bits;
  std::memcpy(&bits, from, sizeof(bits));
  return FromHalf(bits);
}
inline void Store(float16* to, const Vec& v) {
  const ShortVec bits = ToHalf(v);
  std::memcpy(to, &bits, sizeof(bits));
}

// fp8 by way of half precision, whose conversion takes subnormal numbers at full speed. The bits of e4m3 under its
// exponent are 2^-8 of the number; e5m2 is its upper byte.
inline Vec Load(const float8_e4m3* from) {
  const ShortVec x = WidenSigned(&from->bits), moved = (x << 7) & 0xBF80;  // the sign is in every upper bit
  return FromHalf((x & 0x7F) == E4M3Format::QUIET_NAN ? ShortVec{} + HalfFormat::QUIET_NAN : moved) * 256.f;
}
inline Vec Load(const float8_e5m2* from) { return FromHalf(WidenSigned(&from->bits) << 8); }
#endif

/// Active lanes of an iteration: all lanes, or (at the end of a row) the first `count`.
struct AllLanes {};
struct SomeLanes {
  int count;
};

/// Call body(i, lanes) for each vector of [0, n). The body is generic over lanes, so the tail is separate code and the
/// main loop has no masks.
template <typename Body>
inline void ForEachVec(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) body(i, AllLanes{});
  if (i < n) body(i, SomeLanes{static_cast<int>(n - i)});
}

template <typename T>
inline Vec Load(const T* from, AllLanes) {
  return Load(from);
}

/// Load the active lanes; the other lanes are 0.
template <typename T>
inline Vec Load(const T* from, SomeLanes lanes) {
  T padded[LANES] = {};
  std::memcpy(padded, from, lanes.count * sizeof(T));
  return Load(padded);
}

template <typename T>
inline void Store(T* to, const Vec& v, AllLanes) {
  Store(to, v);
}

template <typename T>
inline void Store(T* to, const Vec& v, SomeLanes lanes) {
  T padded[LANES];
  Store(padded, v);
  std::memcpy(to, padded, lanes.count * sizeof(T));
}

/// Round v to the precision of T.
template <typename T>
inline Vec Round(const Vec& v) {
  return DecodeLanes<typename T::Format>(Encode<typename T::Format, UintVec>(v));
}

/// Return v with the inactive lanes set to 0.
inline Vec Keep(const Vec& v, AllLanes) { return v; }
inline Vec Keep(const Vec& v, SomeLanes lanes) {
  float padded[LANES];
  Store(padded, v);
  return Load(padded, lanes);
}

/// Return the sum of N lanes, by adding the upper half to the lower half. N is a power of two.
template <int N>
inline float SumLanes(const float* lane) {
  if constexpr (N == 1) {
    return lane[0];
  } else {
    float sum[N / 2];
    for (int i = 0; i < N / 2; ++i) sum[i] = lane[i] + lane[i + N / 2];
    return SumLanes<N / 2>(sum);
  }
}

inline float ReduceSum(const Vec& v) {
  float lane[LANES];
  Store(lane, v);
  return SumLanes<LANES>(lane);
}

/// Sum over many vectors. Two accumulators alternate: with one, each addition would wait for the previous one.
class RunningSum {
 public:
  void Add(const Vec& v) {
    const Vec next = first_ + v;
    first_ = second_;
    second_ = next;
  }
  float Total() const { return ReduceSum(first_ + second_); }

 private:
  Vec first_{}, second_{};
};

/// Return e^x to about 1 ulp: 2^n * e^r with |r| <= ln(2) / 2. Saturates to 0 and infinity; NaN stays NaN.
inline Vec Exp(const Vec& x) {
  const Vec low = Broadcast(-104.0f), high = Broadcast(89.0f);  // past the ends of the float range
  const Vec clamped = x < low ? low : (x > high ? high : x);
  const Vec magic = Broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (clamped * 1.44269504f + magic) - magic;
  const Vec r = (clamped - n * 0.693145752f) - n * 1.42860682e-6f;  // ln(2) in two parts: n times the first is exact
  Vec e = Broadcast(1.0f / 5040);                                   // Taylor to r^7: the remainder is 6e-9
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) e = e * r + c;
  // 2^n in two factors, since n reaches 129 and -150 where a float's exponent does not.
  const IntVec exponent = __builtin_convertvector(n, IntVec), half = exponent >> 1;
  return e * BitCast<Vec>((half + 127) << 23) * BitCast<Vec>((exponent - half + 127) << 23);
}

}  // namespace cpu
}  // namespace flashinfer
