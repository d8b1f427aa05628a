// SPDX-License-Identifier: Apache-2.0
// A segment of a row (fixed_point.h) in the registers of a warp: loading, sums, sampling.
#pragma once
#include "../ptx/load.cuh"
#include "../ptx/reduce.cuh"
#include "../ptx/send.cuh"
#include "cluster_row.cuh"

namespace flashinfer {
namespace sampling {

constexpr int VECTORS = SEGMENT / WARP_COLUMNS;  // vectors of four columns per lane

/// A row that warps read in segments. Vector j of a lane: four columns from j * WARP_COLUMNS + 4 * lane on.
struct SegmentSource {
  const float* row;
  int vocab;
  bool aligned;
  bool has_vectors;  // the row consists of whole vectors only

  __device__ __forceinline__ SegmentSource(const float* row, int64_t vocab)
      : row(row),
        vocab(int(vocab)),
        aligned(reinterpret_cast<uintptr_t>(row) % 16 == 0),
        has_vectors(aligned && vocab % 4 == 0) {}

  __device__ __forceinline__ int Count() const { return (vocab + SEGMENT - 1) / SEGMENT; }

  /// Return the first column of this lane's vector j.
  static __device__ __forceinline__ int Column(int segment, int j) {
    return segment * SEGMENT + j * WARP_COLUMNS + threadIdx.x % 32 * 4;
  }

  /// True if a segment is read in vectors, each of which exists as a whole or not at all.
  __device__ __forceinline__ bool IsOfVectors(int segment) const {
    return has_vectors || (aligned && (segment + 1) * SEGMENT <= vocab);
  }

  /// Load a segment. ONCE: the row is not read again soon, which makes the load faster for inputs that are only read,
  /// and slower for buffers that are also written.
  template <bool ONCE>
  __device__ __forceinline__ void Load(int segment, float pad, float (&x)[VECTORS][4]) const {
    const float* const from = row + Column(segment, 0);
    const int left = vocab - Column(segment, 0);
    if (IsOfVectors(segment)) {
#pragma unroll
      for (int j = 0; j < VECTORS; ++j) {
        const bool exists = j * WARP_COLUMNS < left;
        if constexpr (ONCE) {
          ptx::LoadOnce(exists, from + j * WARP_COLUMNS, pad, x[j]);
        } else {
          x[j][0] = x[j][1] = x[j][2] = x[j][3] = pad;
          if (exists) LoadFloats(from + j * WARP_COLUMNS, x[j]);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < VECTORS; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = j * WARP_COLUMNS + e;
          x[j][e] = pad;
          if (i < left) x[j][e] = from[i];
        }
      }
    }
  }

  /// Load four columns from i on.
  __device__ __forceinline__ void LoadFour(int i, float pad, float (&x)[4]) const {
    if (aligned && i + 4 <= vocab) {
      LoadFloats(row + i, x);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = i + e < vocab ? row[i + e] : pad;
    }
  }
};

/// Call f(segment, wait, refill) for each of this warp's segments of a row; x holds the columns. wait() blocks until
/// all blocks of the cluster run and may be sent data; all threads must have arrived at the cluster barrier once.
/// REFILL: f calls refill(j) when it is done with x[j], which starts the load of the next segment. meanwhile() is
/// called while the first segment is loaded. Returns the last segment, or -1 without one.
template <bool REFILL, typename Meanwhile, typename F>
__device__ __forceinline__ int ForEachSegment(const SegmentSource& source, float pad, float (&x)[VECTORS][4],
                                              const Meanwhile& meanwhile, const F& f) {
  const int warps = blockDim.x / 32, step = ptx::ClusterSize() * warps, count = source.Count();
  int segment = ptx::ClusterRank() * warps + threadIdx.x / 32, last = -1;
  const auto wait = [&] {
    if (last < 0) ptx::ClusterWait();
  };
  if (segment < count) source.Load<true>(segment, pad, x);
  meanwhile();
#pragma unroll 1
  while (segment < count) {
    const int next = segment + step;
    const bool is_refilled = REFILL && next < count && source.IsOfVectors(next);
    const float* const from = source.row + SegmentSource::Column(next, 0);
    const int left = is_refilled ? source.vocab - SegmentSource::Column(next, 0) : 0;
    f(segment, wait, [&](int j) {
      if (REFILL) ptx::LoadOnce(j * WARP_COLUMNS < left, from + j * WARP_COLUMNS, pad, x[j]);
    });
    if (!is_refilled && next < count) source.Load<true>(next, pad, x);
    last = segment, segment = next;
  }
  wait();
  return last;
}

/// Sum of a segment, as blocks send it to each other.
struct alignas(16) SegmentSum {
  uint64_t mass;
  int32_t exponent;       // logits: exponent that the mass is relative to
  uint32_t has_positive;  // probabilities: whether any weight is positive

  /// LogitScale::ShiftTo.
  __device__ __forceinline__ int ShiftTo(int other) const { return min(other - exponent, 63); }
  __device__ __forceinline__ void Send(SegmentSum* to, uint32_t rank, uint64_t* barrier) const {
    const uint4 words{uint32_t(mass), uint32_t(mass >> 32), uint32_t(exponent), has_positive};
    ptx::Send(reinterpret_cast<uint4*>(to), rank, words, barrier);
  }
};

template <typename F>
__device__ __forceinline__ void ForEachColumn(float (&x)[VECTORS][4], const F& f) {
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) f(x[j][e]);
  }
}

__device__ __forceinline__ uint32_t WarpLargest(uint32_t x) { return ptx::ReduceMax(x); }
__device__ __forceinline__ int WarpLargest(int x) {
  constexpr uint32_t SIGN = 0x80000000u;
  return int(WarpLargest(uint32_t(x) ^ SIGN) ^ SIGN);
}

/// Return the largest of this lane's columns of a segment.
__device__ __forceinline__ float LargestOf(const float (&x)[VECTORS][4]) {
  float largest = -INFINITY;
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {  // in groups of four: a dependent chain of 32 would be slow
    largest = fmaxf(largest, fmaxf(fmaxf(x[j][0], x[j][1]), fmaxf(x[j][2], x[j][3])));
  }
  return largest;
}

/// Return the maximum over the warp of floats that are not NaN.
__device__ __forceinline__ float WarpLargest(float x) {
  const uint32_t key = WarpLargest(OrderedKey(x));
  return FromBits(key >> 31 ? key ^ 0x80000000u : ~key);
}

/// Return the warp's sum of 32 numbers below 2^54.
__device__ __forceinline__ uint64_t WarpMass(uint64_t x) {
  constexpr int BITS = 27;
  const uint32_t low = ptx::ReduceAdd(uint32_t(x) & ((1u << BITS) - 1));
  return low + (uint64_t{ptx::ReduceAdd(uint32_t(x >> BITS))} << BITS);
}

/// MassOf(sum, ONE) in two instructions.
__device__ __forceinline__ uint64_t UnitMass(float sum) { return __float2ull_rz(fminf(sum, 16.f) * 1099511627776.f); }

__device__ __forceinline__ float SumOf(const float (&x)[4]) { return Sum4(x[0], x[1], x[2], x[3]); }

/// Sums of UnitMass over a warp without conversions to 64 bits, each of which costs as much as eight additions. A mass
/// is a multiple of 2^23 plus a remainder: adding constants of the right size, rounding down, leaves both in the
/// fraction bits of floats. Up to 16 masses per lane.
struct UnitMassSum {
  __device__ __forceinline__ void Add(float sum) {
    const float x = fminf(sum, 16.f), above = __fadd_rd(x, HIGH), rest = x - (above - HIGH);
    high += Bits(above) - Bits(HIGH), low += Bits(__fadd_rd(rest, LOW)) - Bits(LOW);
  }
  __device__ __forceinline__ uint64_t OfWarp() const {
    return (uint64_t{ptx::ReduceAdd(high)} << 23) + ptx::ReduceAdd(low);
  }

 private:
  static constexpr float HIGH = 64.f, LOW = 7.62939453125e-6f;  // 2^-17: lowest bits are 2^-17 and 2^-40
  uint32_t high = 0, low = 0;
};

/// Return the mass of a segment of weights. ANY: some may be NaN, which counts as 0.
template <bool ANY = false>
__device__ __forceinline__ uint64_t MassOfSegment(const float (&x)[VECTORS][4]) {
  UnitMassSum mass;
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    float four[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) four[e] = ANY ? Positive(x[j][e]) : x[j][e];
    mass.Add(SumOf(four));
  }
  return mass.OfWarp();
}

/// Return the largest logit of the row times `factor`, by one warp: for rows with far logits, which are worth another
/// read.
__device__ __forceinline__ float LargestProduct(const SegmentSource& source, float factor) {
  float largest = -INFINITY;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < source.vocab; i += 32) largest = fmaxf(largest, source.row[i] * factor);
  return WarpLargest(largest);
}

/// LargestProduct as a separate function, so that it takes no registers from callers that rarely need it.
inline __device__ __noinline__ float LargestProductApart(const SegmentSource& source, float factor) {
  return LargestProduct(source, factor);
}

/// Return the scale of the weights of a segment of logits; far logits are brought near. top_of_row() returns the
/// largest logit of the row.
template <typename F>
__device__ __forceinline__ LogitScale ScaleOf(float (&x)[VECTORS][4], const F& top_of_row) {
  const float largest = WarpLargest(LargestOf(x));
  if (!LogitScale::IsFar(largest)) return LogitScale::Near(largest);
  const LogitScale scale = LogitScale::Far(largest, top_of_row);
  ForEachColumn(x, [&](float& value) { value = scale.Brought(value); });
  return scale;
}

/// ScaleOf for logits that were multiplied by `factor`.
__device__ __forceinline__ LogitScale ScaleOf(const SegmentSource& source, float factor, float (&x)[VECTORS][4]) {
  return ScaleOf(x, [&] { return LargestProduct(source, factor); });
}

/// ColumnWhere for weights that are not negative, without branches.
template <typename F>
__device__ __forceinline__ int ColumnOfFour(const float (&x)[4], const F& reaches) {
  float running = 0.f;
  int column = 4, last = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    running += x[e];
    last = x[e] > 0.f ? e : last;
    column = min(column, x[e] > 0.f && reaches(running) ? e : 4);
  }
  return column < 4 ? column : last;
}

/// Search `target`, a unit of shifted masses, in the four weights that each lane has from `column` on; mass_of(sum) is
/// the mass of a sum. The lane that holds it calls found(column). Otherwise `before`, the mass of earlier columns, is
/// advanced past these columns.
template <typename Mass, typename F>
__device__ __forceinline__ bool FindInWarp(const float (&x)[4], int column, uint64_t target, int shift,
                                           uint64_t& before, const Mass& mass_of, const F& found) {
  const uint64_t mass = mass_of(SumOf(x)), through = before + WarpInclusiveScan(mass), mine = through - mass;
  const uint32_t reached = __ballot_sync(0xffffffffu, through >> shift >= target);
  if (reached == 0) {
    before = __shfl_sync(0xffffffffu, through, 31);
    return false;
  }
  if (int(threadIdx.x % 32) == __ffs(reached) - 1) {
    found(column + ColumnOfFour(x, [&](float sum) { return (mine + mass_of(sum)) >> shift >= target; }));
  }
  return true;
}

}  // namespace sampling
}  // namespace flashinfer
