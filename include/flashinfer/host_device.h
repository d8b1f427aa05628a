// SPDX-License-Identifier: Apache-2.0
// Functions that run on the host and on the device, in headers that either compiler reads.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define FLASHINFER_HD __host__ __device__ __forceinline__
#else
#define FLASHINFER_HD inline
#ifdef FLASHINFER_CPU  // CUDA qualifiers in users' attention variants expand to nothing on the CPU
#define __device__
#define __host__
#define __forceinline__ inline
#endif
#endif

namespace flashinfer {

/// Division n / divisor for n < 2^31 by a multiplication and a shift: magic = ceil(2^(31 + s) / divisor), with
/// divisor <= 2^s, makes the quotient too large by less than n / 2^31 / divisor, which never reaches the next integer.
struct FastDivisor {
  uint32_t divisor, magic, shift;

  FastDivisor() = default;
  explicit FastDivisor(uint32_t d) : divisor(d), magic(0), shift(0) {  // magic 0: divide by one
    while (d > (uint64_t{2} << shift)) ++shift;
    if (d > 1) magic = uint32_t(((uint64_t{1} << (32 + shift)) + d - 1) / d);
  }
  FLASHINFER_HD uint32_t Divide(uint32_t n) const {
#ifdef __CUDA_ARCH__
    return (magic == 0 ? n : __umulhi(n, magic)) >> shift;  // no load of a constant waits for another one
#else
    return magic == 0 ? n : uint32_t((uint64_t{n} * magic) >> (32 + shift));
#endif
  }
};

}  // namespace flashinfer
