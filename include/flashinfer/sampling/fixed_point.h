// SPDX-License-Identifier: Apache-2.0
// Fixed-point arithmetic of sampling, one definition for both backends. Every sum over a row is a sum of integers,
// which does not depend on the order of addition: the same row and the same random bits give the same token for any
// number of threads, on CPU and GPU.
//
//   weight   a probability, or e^(logit - max); anything that is not > 0 (NaN too) counts as 0
//   key      the bits of a weight; as unsigned integers, keys are ordered as the weights are
//   emax     biased exponent of the row's largest weight; fixed-point numbers are relative to 2^(emax - 127)
//   mass     fixed-point sum of 4 neighbouring columns, (a + b) + (c + d) in float, in units of 2^-40 of
//            2^(emax - 127). Sampling adds up masses; a normaliser adds up the masses of single columns
//   segment  SEGMENT columns of a row. Without a threshold search, the weights of a segment of logits are relative to
//            a power of two of the segment, so that they can be summed before the row's largest logit is known;
//            sums of segments are then shifted to the row's power of two
//   quantum  one weight rounded to units of 2^-31 of 2^(emax - 127), 32 bits. The search for a top-p threshold, and
//            sampling with such a threshold, add up quanta: unlike masses, quanta of any subset of columns can be
//            added. For sampling from ordinary probabilities emax is ONE, so that one read of the row is enough
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../philox.h"

namespace flashinfer {
namespace sampling {

constexpr int ONE = 127;  // emax of weights in [1, 2)
constexpr uint64_t UNLIMITED = ~uint64_t{0};

/// Limits of a filter: a kept column has fewer than `count` columns and fewer than `quanta` quanta above it.
struct FilterLimits {
  uint64_t count, quanta;
};

/// Threshold of a filter.
struct KeyThreshold {
  uint32_t key;          ///< smallest key that is kept
  uint64_t kept_quanta;  ///< quanta of all kept columns
};

FLASHINFER_HD uint32_t Bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

FLASHINFER_HD float FromBits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

/// x if it is > 0, else +0.
FLASHINFER_HD float Positive(float x) {
#ifdef __CUDA_ARCH__
  return fmaxf(x, 0.f);  // one instruction; NaN and -0 become +0
#else
  return x > 0.f ? x : 0.f;
#endif
}

/// Map any float to an integer with the same order; a NaN without sign is above infinity.
FLASHINFER_HD uint32_t OrderedKey(float x) {
  const uint32_t bits = Bits(x);
  return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}

FLASHINFER_HD int BiasedExponent(float x) { return int(Bits(x) >> 23 & 0xFFu); }

/// Return emax of a row of probabilities for a filter: ONE for ordinary rows, so that it need not be known in advance,
/// else the exponent of the largest probability.
FLASHINFER_HD int ExponentOfProbs(float largest) {
  const int exponent = BiasedExponent(largest);
  return exponent >= ONE - 24 && exponent <= ONE ? ONE : exponent;
}

/// Return the factor that logits are multiplied by. Temperature 0 stands for an infinite temperature, at which only
/// -inf differs from other logits.
FLASHINFER_HD float FactorOf(float temperature) { return temperature == 0.f ? 1e-37f : 1.f / temperature; }

constexpr float LOG2_E = 1.44269504f;

/// Threshold of "far" segments: beyond it, integers near the exponents of the logits would not be exact in a float. Low
/// temperatures produce such logits.
constexpr float FAR_LOGIT = 2097152.f;
constexpr int FAR_EXPONENT = 3025551;  // exponent of e^FAR_LOGIT

/// Largest exponent in use: beyond this logit, neighbouring floats are so far apart that all but the largest of a row
/// weigh nothing.
constexpr float LARGEST_LOGIT = 536870912.f;
constexpr int LARGEST_EXPONENT = 774541002;
constexpr int LEAST_EXPONENT = -(1 << 30);  // exponent of a segment of -inf, below any other

/// Maps the logits of a segment to weights e^x / 2^exponent.
struct LogitScale {
  int exponent;
  float magic;                   ///< adding it rounds to an integer whose lowest bits are relative to the exponent
  float least;                   ///< logits below it weigh nothing; those above give normal numbers
  float base = 0.f, rest = 0.f;  ///< far logits use 2^exponent = e^(base - rest)

  /// Scale of near logits; `exponent` is an integer.
  FLASHINFER_HD explicit LogitScale(float exponent)
      : exponent(int(exponent)), magic(12582912.f - exponent), least((exponent - 122.5f) * 0.693147182f) {}

  /// Scale of logits up to `largest`, which is near: weights are at most sqrt(2).
  static FLASHINFER_HD LogitScale Near(float largest) {
    return LogitScale(fmaf(largest, LOG2_E, 12582912.f) - 12582912.f);
  }
  static FLASHINFER_HD bool IsFar(float largest) { return !(fabsf(largest) <= FAR_LOGIT); }

  /// Scale of far logits, whose weights are those of their Brought values. top_of_row() returns the largest logit of
  /// the row.
  template <typename F>
  static FLASHINFER_HD LogitScale Far(float largest, const F& top_of_row) {
    int exponent = LARGEST_EXPONENT;
    if (fabsf(largest) < LARGEST_LOGIT) {
      exponent = int(rint(fabs(double(largest)) * 1.4426950408889634));
      exponent = exponent > FAR_EXPONENT ? exponent : FAR_EXPONENT + 1;
    }
    return Of(largest == -INFINITY ? LEAST_EXPONENT : largest < 0.f ? -exponent : exponent, top_of_row);
  }

  /// Scale of a segment with this exponent.
  template <typename F>
  static FLASHINFER_HD LogitScale Of(int exponent, const F& top_of_row) {
    LogitScale scale(0.f);
    scale.exponent = exponent;
    if (!scale.IsFar()) return LogitScale(float(exponent));
    if (exponent == LARGEST_EXPONENT || exponent == -LARGEST_EXPONENT) {
      scale.base = top_of_row();
    } else {
      constexpr double LN_2 = 0.6931471805599453;
      scale.base = float(exponent * LN_2);
      scale.rest = float(fma(double(exponent), -LN_2, double(scale.base)));
    }
    return scale;
  }

  FLASHINFER_HD bool IsFar() const { return exponent > FAR_EXPONENT || exponent < -FAR_EXPONENT; }

  /// Shift a far logit into the range that Weight and Summand accept. NaN stays NaN, and infinity may equal `base`.
  FLASHINFER_HD float Brought(float x) const { return x == base ? rest : (x - base) + rest; }

  /// Weight of a logit to 2 ulp; NaN stays NaN. Fused multiply-adds make both backends round alike. The selections are
  /// cheap on purpose: compilers turn expensive ones into branches.
  FLASHINFER_HD float Weight(float x) const {
    const bool is_nothing = x < least;
    return Power(is_nothing ? least : x, is_nothing);
  }
  /// Weight for sums only: a logit that weighs nothing, or NaN, gives a weight that never counts.
  FLASHINFER_HD float Summand(float x) const { return Power(fmaxf(x, least), false); }

  /// Right shift that makes masses relative to `other`, which is not smaller than `exponent`.
  FLASHINFER_HD int ShiftTo(int other) const { return other - exponent < 63 ? other - exponent : 63; }

 private:
  FLASHINFER_HD float Power(float x, bool is_nothing) const {
    const float t = fmaf(x, LOG2_E, magic), n = t - magic;
    const float r = fmaf(n, 1.90465421e-9f, fmaf(n, -0.693147182f, x));  // ln(2) in two parts
    float e = fmaf(8.312520571e-3f, r, 4.189015925e-2f);                 // minimax on [-ln(2) / 2, ln(2) / 2]
    e = fmaf(e, r, 1.666711420e-1f);
    e = fmaf(e, r, 4.999923110e-1f);
    e = fmaf(e, r, 1.f);
    e = fmaf(e, r, 1.f);
    return e * FromBits(is_nothing ? 0u : (Bits(t) << 23) + 0x3F800000u);
  }
};

/// Mass of a sum of four weights. A sum above the range of emax (only weights above 1 where emax is fixed) counts as
/// 2^4.
FLASHINFER_HD uint64_t MassOf(float sum, int emax) {
  const uint32_t bits = Bits(sum);
  const uint32_t exponent = bits >> 23, fraction = bits & 0x7FFFFFu;
  const int shift = emax + 3 - int(exponent);
  const uint32_t significand = exponent == 0 ? fraction << 1 : shift < 0 ? 0x1000000u : fraction | 0x800000u;
  return (uint64_t(significand) << 20) >> (shift < 0 ? 0 : shift > 63 ? 63 : shift);
}

FLASHINFER_HD float Sum4(float a, float b, float c, float d) { return (a + b) + (c + d); }

/// 2^exponent, 0 below the normal numbers.
FLASHINFER_HD float PowerOf2(int exponent) { return exponent < -126 ? 0.f : FromBits(uint32_t(exponent + 127) << 23); }

/// Multiplies a weight by 2^31 / 2^(emax - 127), in two steps because one factor may be out of a float's range.
struct Scale {
  float first, second;

  FLASHINFER_HD explicit Scale(int emax)
      : first(emax < 64 ? 1.8446744e19f : 1.f),
        second(PowerOf2(31 + ONE - (emax < 1 ? 1 : emax) - (emax < 64 ? 64 : 0))) {}
  FLASHINFER_HD float operator()(float weight) const { return weight * first * second; }
};

FLASHINFER_HD uint32_t QuantumOf(float weight, const Scale& scale) {
#ifdef __CUDA_ARCH__
  return __float2uint_rn(scale(weight));
#else
  const float x = scale(weight);
  return x < 4294967296.f ? uint32_t(int64_t(nearbyintf(x))) : ~uint32_t{0};
#endif
}

/// Mass of one column, truncated.
FLASHINFER_HD uint64_t ColumnMass(float weight, const Scale& scale) {
  const float units = scale(weight) * 512.f;
  return uint64_t(units < 4398046511104.f ? units : 4398046511104.f);  // 2^42: only infinity has more
}

/// Quanta limit of top_p: columns are kept while the columns above them have fewer quanta. At least 1, which keeps the
/// largest column; unlimited from 1 on. Without `total` the row is taken as normalised.
FLASHINFER_HD uint64_t QuantaLimit(float top_p, int emax) {
  if (top_p >= 1.f) return UNLIMITED;
  const double limit = top_p > 0.f ? ceil(ldexp(double(top_p), 31 + ONE - (emax < 1 ? 1 : emax))) : 1.;
  return limit < 9e18 ? uint64_t(limit) : UNLIMITED;
}
FLASHINFER_HD uint64_t QuantaLimitOf(float top_p, uint64_t total) {
  if (top_p >= 1.f) return UNLIMITED;
  return top_p > 0.f && total > 0 ? uint64_t(ceil(double(top_p) * double(total))) : 1;
}

/// QuantaLimit where emax is ONE and top_p is below 1.
FLASHINFER_HD uint64_t LimitOfProbs(float top_p) { return top_p > 0.f ? uint64_t(ceilf(top_p * 2147483648.f)) : 1; }

/// Select the sampled unit of mass, uniformly from 1 to `total`.
FLASHINFER_HD uint64_t TargetOf(uint64_t random, uint64_t total) {
#ifdef __CUDA_ARCH__
  return __umul64hi(random, total) + 1;
#else
  return uint64_t((static_cast<unsigned __int128>(random) * total) >> 64) + 1;
#endif
}
constexpr uint64_t MASS_OF_ONE = uint64_t{1} << 40;  // mass of the weight 1 where emax is ONE

/// Divides weights of logits by their sum.
struct Normaliser {
  float sum, inverse;

  FLASHINFER_HD explicit Normaliser(uint64_t mass)
      : sum(float(mass) * (1.f / float(MASS_OF_ONE))), inverse(mass == 0 ? 0.f : 1.f / sum) {}

  /// True if one weight may be the whole sum: multiplying by `inverse` could then miss 1, so the quotient needs a
  /// correction step.
  FLASHINFER_HD bool IsPeaked() const { return sum < 2.f; }
  FLASHINFER_HD float operator()(float weight) const {
    const float quotient = weight * inverse;
    return fmaf(fmaf(-quotient, sum, weight), inverse, quotient);
  }
};

/// Return the first of four columns at which reaches(running sum) holds, else the last positive one.
template <typename Reaches>
FLASHINFER_HD int ColumnWhere(const float (&weight)[4], const Reaches& reaches) {
  int chosen = 0;
  float running = 0.f;
  bool found = false;
  for (int i = 0; i < 4; ++i) {
    if (weight[i] > 0.f && !found) {
      running += weight[i];
      chosen = i;
      found = reaches(running);
    }
  }
  return chosen;
}

/// Return the column of four that holds unit `target` of their mass.
FLASHINFER_HD int ColumnOf(const float (&weight)[4], uint64_t target, int emax) {
  return ColumnWhere(weight, [&](float sum) { return MassOf(sum, emax) >= target; });
}

/// Return the column of four that holds unit `target` of their quanta.
FLASHINFER_HD int ColumnOfQuanta(const float (&weight)[4], uint64_t target, const Scale& scale) {
  uint64_t through = 0;
  int column = 0;
  for (; column < 3; ++column) {
    through += QuantumOf(weight[column], scale);
    if (through >= target) break;
  }
  return column;
}

/// The smallest weight that min_p keeps.
FLASHINFER_HD float MinPThreshold(float min_p, float largest) { return (min_p < 1.f ? min_p : 1.f) * largest; }

}  // namespace sampling
}  // namespace flashinfer
