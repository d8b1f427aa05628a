// SPDX-License-Identifier: Apache-2.0
// Sums of the weights above a bound in a row whose largest weight is not known yet, only that of a sample. Quanta are
// relative to the largest weight of the row, so they are summed for each exponent that it may turn out to have.
#pragma once
#include "row_chunks.cuh"

namespace flashinfer {
namespace sampling {

constexpr int CERTAIN_MARGIN = 3;  // octaves by which the largest weight may exceed the sample's
constexpr int CERTAIN_BITS = 13;   // low bits of quanta that are summed separately
// Minimum quanta of the bound: masses are then integers for each of these exponents.
constexpr float CERTAIN_LEAST = 0x1p17f;

struct CertainShared {
  int32_t emax;  // exponent of the sample's largest weight
  bool is_exact;
  uint64_t count, mass, quanta[CERTAIN_MARGIN + 1];

  static __device__ __forceinline__ CertainShared For(uint32_t high, int emax) {
    const Scale scale(emax);
    return {emax, scale.first == 1.f && scale(FromBits(min(high, Bits(INFINITY)))) >= CERTAIN_LEAST, 0, 0, {}};
  }
  /// True if the sums are known for the exponent of the row's largest weight.
  __device__ __forceinline__ bool Has(int of_row) const { return is_exact && of_row - emax <= CERTAIN_MARGIN; }
  __device__ __forceinline__ ColumnSums Of(int of_row) const {
    return {count, quanta[of_row - emax], mass >> (of_row - emax)};
  }
};

/// Sums of one thread.
struct CertainSums {
  const float high, factor;
  uint32_t count = 0, rounded[CERTAIN_MARGIN + 1] = {};
  uint64_t whole = 0;
  int64_t part = 0;

  __device__ __forceinline__ CertainSums(uint32_t high, int emax)
      : high(FromBits(min(high, Bits(INFINITY)))), factor(Scale(emax).second * (1.f / float(1 << CERTAIN_BITS))) {}

  /// Add the weights of a chunk. Adding 2^23 rounds to an integer in the lowest bits of the float, which is faster than
  /// conversions and 64-bit sums. The remainder is exact and signed, so it is added to the middle of an octave.
  __device__ __forceinline__ void Add(const float (&x)[CHUNK_VECTORS][4]) {
    constexpr float INTEGER = 0x1p23f, SIGNED_INTEGER = 0x1.8p23f;
    uint32_t wholes = 0, parts = 0;
#pragma unroll
    for (int i = 0; i < CHUNK_COLUMNS; ++i) {
      const float value = x[i / 4][i % 4] > high ? x[i / 4][i % 4] : 0.f;
      const float sum = fmaf(value, factor, INTEGER), rest = fmaf(value, factor, INTEGER - sum);
      wholes += Bits(sum), parts += Bits(fmaf(rest, float(512 << CERTAIN_BITS), SIGNED_INTEGER));
#pragma unroll
      for (int octave = 0; octave <= CERTAIN_MARGIN; ++octave) {
        rounded[octave] += Bits(fmaf(rest, float(1 << (CERTAIN_BITS - octave)), SIGNED_INTEGER));
      }
    }
    whole += wholes - CHUNK_COLUMNS * Bits(INTEGER);
    part += int32_t(parts - CHUNK_COLUMNS * Bits(SIGNED_INTEGER));
#pragma unroll
    for (int octave = 0; octave <= CERTAIN_MARGIN; ++octave) rounded[octave] -= CHUNK_COLUMNS * Bits(SIGNED_INTEGER);
  }

  /// Add the sums of the warp to those in shared memory.
  __device__ __forceinline__ void AddTo(CertainShared& shared) const {
    const auto add = [](uint64_t& to, uint64_t x) {
      x = WarpSum(x);
      if (threadIdx.x % 32 == 0) atomicAdd(reinterpret_cast<unsigned long long*>(&to), x);
    };
    add(shared.count, count), add(shared.mass, (whole << (CERTAIN_BITS + 9)) + part);
#pragma unroll
    for (int octave = 0; octave <= CERTAIN_MARGIN; ++octave) {
      add(shared.quanta[octave], (whole << (CERTAIN_BITS - octave)) + int64_t(int32_t(rounded[octave])));
    }
  }
};

}  // namespace sampling
}  // namespace flashinfer
