// SPDX-License-Identifier: Apache-2.0
// A row that is read in segments (fixed_point.h), each in the registers of a warp: loads, sums of segments, and inverse
// transform sampling: the segment that holds the sampled unit of mass, and the column within that segment.
#pragma once
#include "../ptx/load.cuh"
#include "../ptx/reduce.cuh"
#include "../ptx/send.cuh"
#include "../sampling.cuh"

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
    if (last < 0) ptx::ClusterWaitApart();  // warps without a segment wait behind the loop
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

__device__ __forceinline__ uint64_t RandomOf(const SampleParams& p, int64_t output) {
  return RandomBits(ValueOf(p.random.seed, output), ValueOf(p.random.offset, output), output);
}

/// Return the sum of the segment x of probabilities or logits; refill(j) is called when x[j] is no longer needed.
/// top_of_row() returns the largest logit.
template <bool LOGITS, typename Top, typename Refill>
__device__ __forceinline__ SegmentSum SumOfSegment(float (&x)[VECTORS][4], const Top& top_of_row,
                                                   const Refill& refill) {
  SegmentSum sum{};
  UnitMassSum mass;
  float largest = 0.f;
  LogitScale scale(0.f);
  if constexpr (LOGITS) {
    scale = ScaleOf(x, top_of_row);
    sum.exponent = scale.exponent;
  }
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[j][e] = LOGITS ? scale.Summand(x[j][e]) : Positive(x[j][e]);
    const float four = SumOf(x[j]);
    mass.Add(four);
    if (!LOGITS) largest = fmaxf(largest, four);
    refill(j);
  }
  if (!LOGITS) sum.has_positive = __any_sync(0xffffffffu, largest > 0.f);
  sum.mass = mass.OfWarp();
  return sum;
}

/// Fallback when rounding leaves the target above the total: write the last positive column of `segment`, or -1 without
/// one. By one warp.
template <typename F>
__device__ __forceinline__ void WriteLast(const SegmentSource& source, int segment, const F& write) {
  int column = -1;
#pragma unroll 1
  for (int j = VECTORS - 1; j >= 0 && segment >= 0 && column < 0; --j) {
    const int i = SegmentSource::Column(segment, j);
    float x[4];
    source.LoadFour(i, 0.f, x);
    column = WarpMax(x[3] > 0.f ? i + 3 : x[2] > 0.f ? i + 2 : x[1] > 0.f ? i + 1 : x[0] > 0.f ? i : -1);
  }
  if (threadIdx.x % 32 == 0) write(column);
}

/// Finds the segment that holds a unit of mass among `count` segments; each warp that needs it does so itself. Each
/// lane owns an odd number of consecutive segments, which avoids shared-memory bank conflicts.
template <bool LOGITS>
struct SegmentPicker {
  static constexpr int HELD = 5;  // segments of a lane that fit in registers
  const SegmentSum* sums;
  int count, each, begin;          // number of segments; per lane; first of this lane
  int top = LEAST_EXPONENT;        // logits: exponent that the masses are relative to
  uint64_t held[HELD];             // running sums, if each == HELD
  uint64_t mass = 0, through = 0;  // mass of this lane; inclusive prefix sum
  int segment = 0;
  uint64_t target = 0;  // unit of mass within the segment

  __device__ __forceinline__ SegmentPicker(const SegmentSum* sums, int count)
      : sums(sums), count(count), each(max((count + 31) / 32 | 1, HELD)), begin(threadIdx.x % 32 * each) {}

  /// Compute prefix sums, once the sums of the segments have arrived.
  __device__ __forceinline__ void Sum() {
    if (each == HELD) {
      int exponents[HELD];
#pragma unroll
      for (int k = 0; k < HELD; ++k) {
        held[k] = 0, exponents[k] = LEAST_EXPONENT;
        if (begin + k < count) held[k] = sums[begin + k].mass, exponents[k] = sums[begin + k].exponent;
        if (LOGITS) top = max(top, exponents[k]);
      }
      if (LOGITS) top = WarpLargest(top);
#pragma unroll
      for (int k = 0; k < HELD; ++k) {
        if (LOGITS) held[k] >>= min(top - exponents[k], 63);
        mass += held[k];
        held[k] = mass;
      }
    } else {
      const int end = min(begin + each, count);
      if constexpr (LOGITS) {
#pragma unroll 1
        for (int s = begin; s < end; ++s) top = max(top, sums[s].exponent);
        top = WarpLargest(top);
      }
#pragma unroll 1
      for (int s = begin; s < end; ++s) mass += MassOf(sums[s]);
    }
    through = WarpInclusiveScan(mass);
  }

  __device__ __forceinline__ uint64_t MassOf(const SegmentSum& sum) const {
    return sum.mass >> (LOGITS ? sum.ShiftTo(top) : 0);
  }
  __device__ __forceinline__ uint64_t Total() const { return __shfl_sync(0xffffffffu, through, 31); }

  /// Find the segment of a unit; returns false if the total mass is smaller.
  __device__ __forceinline__ bool Find(uint64_t unit) {
    const uint32_t reached = __ballot_sync(0xffffffffu, through >= unit);
    if (reached == 0) return false;
    const int owner = __ffs(reached) - 1;
    target = unit - (through - mass);
    segment = begin;
    if (each == HELD) {
      uint64_t before = 0;
#pragma unroll
      for (int k = 0; k < HELD - 1; ++k) {  // unrolled without branches
        const bool is_later = held[k] < target;
        before = is_later ? held[k] : before;
        segment += is_later;
      }
      target -= before;
    } else {
      const int end = min(begin + each, count) - 1;
#pragma unroll 1
      for (int s = begin; s < end; ++s) {
        const uint64_t one = MassOf(sums[s]);
        if (s == segment && one < target) target -= one, ++segment;
      }
    }
    target = __shfl_sync(0xffffffffu, target, owner);
    segment = __shfl_sync(0xffffffffu, segment, owner);
    return true;
  }

  /// Return the last segment with a positive weight, or -1.
  __device__ __forceinline__ int Last() const {
    int last = -1;
#pragma unroll 1
    for (int s = begin; s < min(begin + each, count); ++s) {
      if (sums[s].has_positive) last = s;
    }
    return WarpMax(last);
  }
};

/// Find the column that holds `target`, a unit of the mass of a segment: each warp sums one or more vectors of the
/// segment, and one lane calls found(j, column) for vector j. weights_of(j, four) loads this lane's weights of vector
/// j.
template <typename Weights, typename Mass, typename F>
__device__ __forceinline__ void FindInSegment(uint64_t target, int shift, int warp, int warps,
                                              uint64_t (&masses)[VECTORS], const Weights& weights_of,
                                              const Mass& mass_of, const F& found) {
  const int lane = threadIdx.x % 32;
  float four[4];
  uint64_t mass = 0;
#pragma unroll 1
  for (int j = warp; j < VECTORS; j += warps) {
    weights_of(j, four);
    mass = mass_of(SumOf(four));
    const uint64_t of_warp = WarpMass(mass);
    if (lane == 0) masses[j] = of_warp;
  }
  __syncthreads();
#pragma unroll 1
  for (int j = warp; j < VECTORS; j += warps) {
    uint64_t before = 0;
#pragma unroll
    for (int k = 0; k < VECTORS - 1; ++k) before += k < j ? masses[k] : 0;
    if (before >> shift >= target) return;
    if (warps < VECTORS) {
      if (j < VECTORS - 1 && (before + masses[j]) >> shift < target) continue;
      weights_of(j, four);
      mass = mass_of(SumOf(four));
    }
    const uint64_t through = before + WarpInclusiveScan(mass);
    const uint32_t reached = __ballot_sync(0xffffffffu, through >> shift >= target);
    if (reached == 0) continue;
    if (lane != __ffs(reached) - 1) return;
    const uint64_t mine = through - mass;
    found(j, ColumnOfFour(four, [&](float sum) { return (mine + mass_of(sum)) >> shift >= target; }));
    return;
  }
}

}  // namespace sampling
}  // namespace flashinfer
