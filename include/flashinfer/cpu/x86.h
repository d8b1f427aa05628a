// SPDX-License-Identifier: Apache-2.0
// Conversions between 8, 16 and 32 bits that are one instruction on x86 and that GCC 12 does not find by itself. With GCC
// they are builtins: parsing <immintrin.h> takes 0.45 s, of the 2.4 s that the kernels of an attention module take.
// Other compilers, and a GCC without these builtins, take the header.
#pragma once
#if defined(__F16C__)

#if defined(__GNUC__) && !defined(__clang__) && defined(__has_builtin)
// The value of __has_builtin depends on the target.
#if defined(__AVX512F__) && __has_builtin(__builtin_ia32_vcvtph2ps512_mask) &&                           \
    __has_builtin(__builtin_ia32_vcvtps2ph512_mask) && __has_builtin(__builtin_ia32_pmovzxwd512_mask) && \
    __has_builtin(__builtin_ia32_pmovsxbw256)
#define FLASHINFER_X86_BUILTINS 1
#elif !defined(__AVX512F__) && __has_builtin(__builtin_ia32_vcvtph2ps256) && \
    __has_builtin(__builtin_ia32_vcvtps2ph256) && __has_builtin(__builtin_ia32_pmovsxbw128)
#define FLASHINFER_X86_BUILTINS 1
#endif
#endif
#ifndef FLASHINFER_X86_BUILTINS
#include <immintrin.h>
#endif

namespace flashinfer {
namespace cpu {
namespace x86 {

#if defined(__AVX512F__)
typedef char Bytes __attribute__((vector_size(16)));
typedef short Shorts __attribute__((vector_size(32)));
typedef int Ints __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

inline Bytes LoadBytes(const void* from) {
  Bytes x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}

#ifdef FLASHINFER_X86_BUILTINS
inline Floats FromHalf(const Shorts& x) { return __builtin_ia32_vcvtph2ps512_mask(x, Floats{}, -1, 4); }  // 4: as set
inline Shorts ToHalf(const Floats& x) { return __builtin_ia32_vcvtps2ph512_mask(x, 0, Shorts{}, -1); }    // 0: nearest
inline Shorts WidenBytes(const Bytes& x) { return __builtin_ia32_pmovsxbw256(x); }
inline Ints WidenShorts(const Shorts& x) { return __builtin_ia32_pmovzxwd512_mask(x, Ints{}, -1); }
#else
// "maskz" with every lane on, because the plain forms make GCC 12 warn about its own header.
inline Floats FromHalf(const Shorts& x) {
  return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(0xFFFF, reinterpret_cast<__m256i>(x)));
}
inline Shorts ToHalf(const Floats& x) {
  return reinterpret_cast<Shorts>(
      _mm512_maskz_cvtps_ph(0xFFFF, reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
}
inline Shorts WidenBytes(const Bytes& x) {
  return reinterpret_cast<Shorts>(_mm256_cvtepi8_epi16(reinterpret_cast<__m128i>(x)));
}
inline Ints WidenShorts(const Shorts& x) {
  return reinterpret_cast<Ints>(_mm512_maskz_cvtepu16_epi32(0xFFFF, reinterpret_cast<__m256i>(x)));
}
#endif

#else
typedef char Bytes __attribute__((vector_size(16)));  ///< the lower half counts
typedef short Shorts __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(32)));

inline Bytes LoadBytes(const void* from) {
  typedef long long Words __attribute__((vector_size(16)));
  long long word;
  __builtin_memcpy(&word, from, sizeof(word));
  return reinterpret_cast<Bytes>(Words{word, 0});
}

#ifdef FLASHINFER_X86_BUILTINS
inline Floats FromHalf(const Shorts& x) { return __builtin_ia32_vcvtph2ps256(x); }
inline Shorts ToHalf(const Floats& x) { return __builtin_ia32_vcvtps2ph256(x, 0); }  // 0: to nearest
inline Shorts WidenBytes(const Bytes& x) { return __builtin_ia32_pmovsxbw128(x); }
#else
inline Floats FromHalf(const Shorts& x) {
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(x)));
}
inline Shorts ToHalf(const Floats& x) {
  return reinterpret_cast<Shorts>(_mm256_cvtps_ph(reinterpret_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
}
inline Shorts WidenBytes(const Bytes& x) {
  return reinterpret_cast<Shorts>(_mm_cvtepi8_epi16(reinterpret_cast<__m128i>(x)));
}
#endif
#endif

}  // namespace x86
}  // namespace cpu
}  // namespace flashinfer
#endif
