// SPDX-License-Identifier: Apache-2.0
// Functions that nvcc declares in device code.
#pragma once
#include <cmath>

#include "barriers.h"

using std::max;
using std::min;

inline void __syncthreads() { emulation::Named(0, 0, true); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulation::MeetWarp({}, mask); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emulation::Yield(); }
[[noreturn]] inline void __trap() { emulation::Fail("trap"); }

namespace emulation {

/// Return what the lane chosen by `from` brought.
template <typename T>
T Shuffle(unsigned mask, const T& x, int from) {
  static_assert(sizeof(T) <= 32, "size");
  Words words{};
  std::memcpy(words.data(), &x, sizeof(T));
  const auto& all = MeetWarp(words, mask);
  if ((mask >> from & 1) == 0) Fail("a shuffle from a lane that is not in its mask");
  T y;
  std::memcpy(static_cast<void*>(&y), all[from].data(), sizeof(T));
  return y;
}
inline int Lane() { return state.current->thread % 32; }

}  // namespace emulation

template <typename T>
T __shfl_sync(unsigned mask, T x, int from, int width = 32) {
  return emulation::Shuffle(mask, x, (emulation::Lane() & ~(width - 1)) | (from & (width - 1)));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T x, unsigned offset, int width = 32) {
  const int lane = emulation::Lane(), from = lane - int(offset);
  return emulation::Shuffle(mask, x, from < (lane & ~(width - 1)) ? lane : from);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T x, unsigned offset, int width = 32) {
  const int lane = emulation::Lane(), from = lane + int(offset);
  return emulation::Shuffle(mask, x, from > (lane | (width - 1)) ? lane : from);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32) {
  const int lane = emulation::Lane(), from = lane ^ bits;
  return emulation::Shuffle(mask, x, from > (lane | (width - 1)) ? lane : from);
}
inline unsigned __ballot_sync(unsigned mask, bool x) {
  const auto& all = emulation::MeetWarp({x}, mask);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) {
    if (mask >> i & 1) bits |= (all[i][0] & 1) << i;
  }
  return bits;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T x) {
  const auto& all = emulation::MeetWarp({uint32_t(x)}, mask);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1) && all[i][0] == uint32_t(x)) bits |= 1u << i;
  }
  return bits;
}
inline int __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline int __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, !x) == 0; }
template <typename T, typename F>
T ReduceWarp(unsigned mask, T x, const F& f) {
  const auto& all = emulation::MeetWarp({uint32_t(x)}, mask);
  bool is_first = true;
  T y{};
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1) == 0) continue;
    y = is_first ? T(all[i][0]) : f(y, T(all[i][0]));
    is_first = false;
  }
  return y;
}
template <typename T>
T __reduce_min_sync(unsigned mask, T x) {
  return ReduceWarp(mask, x, [](T a, T b) { return a < b ? a : b; });
}
template <typename T>
T __reduce_max_sync(unsigned mask, T x) {
  return ReduceWarp(mask, x, [](T a, T b) { return a < b ? b : a; });
}
template <typename T>
T __reduce_add_sync(unsigned mask, T x) {
  return ReduceWarp(mask, x, [](T a, T b) { return T(a + b); });
}

inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return uint32_t((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
  return uint32_t((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned(uint64_t(x) * y >> 32); }

template <typename To, typename From>
To BitsAs(const From& x) {
  static_assert(sizeof(To) == sizeof(From), "size");
  To y;
  std::memcpy(static_cast<void*>(&y), &x, sizeof y);
  return y;
}
inline float __uint_as_float(unsigned x) { return BitsAs<float>(x); }
inline float __int_as_float(int x) { return BitsAs<float>(x); }
inline unsigned __float_as_uint(float x) { return BitsAs<unsigned>(x); }
inline int __float_as_int(float x) { return BitsAs<int>(x); }
inline int __float2int_rn(float x) { return int(__builtin_rintf(x)); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = uint64_t(y) << 32 | x;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(both >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  return out;
}
inline uint32_t __vcmpeq2(uint32_t x, uint32_t y) {
  const uint32_t differ = x ^ y;
  return ((differ & 0xffffu) == 0 ? 0xffffu : 0) | ((differ >> 16) == 0 ? 0xffff0000u : 0);
}

inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }

template <typename T>
void __stcg(T* to, T value) {
  *to = value;
}

// Any pointer: an overload for `const T*` in the source of a test is preferred.
template <typename Pointer>
std::decay_t<decltype(*Pointer())> __ldg(Pointer p) {
  return *p;
}
template <typename Pointer>
std::decay_t<decltype(*Pointer())> __ldcg(Pointer p) {
  return *p;
}
template <typename Pointer>
std::decay_t<decltype(*Pointer())> __ldcs(Pointer p) {
  return *p;
}
template <typename T, typename U>
void __stcs(T* p, const U& x) {
  *p = x;
}
template <typename T, typename U>
T atomicAdd(T* p, U x) {
  const T before = *p;
  *p = T(before + x);
  return before;
}
template <typename T, typename U>
T atomicMax(T* p, U x) {
  const T before = *p;
  *p = std::max(before, T(x));
  return before;
}
template <typename T, typename U>
T atomicOr(T* p, U x) {
  const T before = *p;
  *p = T(before | x);
  return before;
}
template <typename T, typename U>
T atomicExch(T* p, U x) {
  const T before = *p;
  *p = T(x);
  return before;
}
