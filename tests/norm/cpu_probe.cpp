// SPDX-License-Identifier: Apache-2.0
// What test_cpu_scalar.py calls through ctypes: each conversion one number at a time and a register at a time, and Exp.
#include <flashinfer/cpu/vec.h>

using namespace flashinfer::cpu;

template <typename To, typename From>
void Scalars(const From* from, To* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = To(from[i]);
}

template <typename To, typename From>
void Vectors(const From* from, To* to, int64_t n) {
  ForEachVec(n, [&](int64_t i, auto lanes) { Store(to + i, Load(from + i, lanes), lanes); });
}

#define EXPORT_CONVERSIONS(T)                                                                                \
  extern "C" void T##_encode_scalar(const float* from, T* to, int64_t n) { Scalars<T, float>(from, to, n); } \
  extern "C" void T##_decode_scalar(const T* from, float* to, int64_t n) { Scalars<float, T>(from, to, n); } \
  extern "C" void T##_encode_vector(const float* from, T* to, int64_t n) { Vectors<T, float>(from, to, n); } \
  extern "C" void T##_decode_vector(const T* from, float* to, int64_t n) { Vectors<float, T>(from, to, n); }

EXPORT_CONVERSIONS(float16)
EXPORT_CONVERSIONS(bfloat16)
EXPORT_CONVERSIONS(float8_e4m3)
EXPORT_CONVERSIONS(float8_e5m2)

extern "C" void exponential(const float* from, float* to, int64_t n) {
  ForEachVec(n, [&](int64_t i, auto lanes) { Store(to + i, Exp(Load(from + i, lanes)), lanes); });
}

extern "C" float sum(const float* from, int64_t n) {
  RunningSum total;
  ForEachVec(n, [&](int64_t i, auto lanes) { total.Add(Load(from + i, lanes)); });
  return total.Total();
}
