// SPDX-License-Identifier: Apache-2.0
// Candidates of sample_one_pass.cuh: the columns near the threshold, listed by a cluster of blocks that reads a row of
// probabilities; the threshold among them; and the final sampling step.
#pragma once
#include "../ptx/prefetch.cuh"
#include "row_segments.cuh"
#include "sample_exact.cuh"
#include "threshold_estimate_rows.cuh"

namespace flashinfer {
namespace sampling {

constexpr int ONE_PASS_CLUSTER = 16;
constexpr int ONE_PASS_WARPS = ONE_PASS_CLUSTER * TOP_WARPS;  // upper bound; clusters of wide blocks have fewer blocks
constexpr int ONE_PASS_CHUNKS = int(MAX_VOCAB / SEGMENT);     // upper bound of the chunks of a row
constexpr int CANDIDATES = 6144;                              // capacity of the list; four blocks fit an SM
constexpr int CANDIDATE_BITS = 9, CANDIDATE_BINS = 1 << CANDIDATE_BITS;
constexpr int FEW_CANDIDATES = 32;
// Limit of the kept quanta: below it no column saturates, and sums fit 32 bits.
constexpr uint64_t MAX_KEPT_QUANTA = ~uint32_t{0};

/// A range whose columns equal to `low` are counted instead of listed if `has_ties`.
struct TiedRange : WeightRange {
  bool has_ties;
  __device__ __forceinline__ float Tie() const { return has_ties ? low : -1.f; }
};

struct CandidateBins {
  uint32_t sums[3][CANDIDATE_BINS];  // counts, and both halves of the quanta
  uint32_t few[FEW_CANDIDATES];
  int32_t bin, last_bin;
  uint32_t count_few, count_before, count_within;
  uint64_t quanta_before, quanta_through;
};

struct OnePassShared {
  ScanShared scan;
  union {
    EstimateShared guess;
    TightShared tight;
    CandidateBins bins;
  };
  union {
    struct {  // filled from the front by this block, from the back by other blocks (leader only)
      uint32_t keys[CANDIDATES];
      uint16_t chunks[CANDIDATES];
    };
    ExactShared leader;
  };
  uint32_t listed, sent;  // numbers of candidates, including those that did not fit
  uint32_t fitting;       // listed candidates of this block that fit
  uint32_t begin;
  TiedRange next;  // next range, from the leader; low = 0: none, high = 0: a column was sampled
  // Leader only: sums that all warps send.
  uint32_t chunk_quanta[ONE_PASS_CHUNKS];
  uint64_t quanta_above[ONE_PASS_WARPS], quanta_below[ONE_PASS_WARPS];
  uint32_t count_above[ONE_PASS_WARPS], count_tied[ONE_PASS_WARPS];
  uint64_t random;
  uint64_t known;             // quanta limit of the columns that top-k keeps, once known (sample_retry.cuh)
  RequestedFilter requested;  // kept here to save registers: spills are slow after a cluster barrier

  __device__ __forceinline__ void Start() { listed = sent = 0, fitting = CANDIDATES; }
};

/// Return the filter parameters of an output.
__device__ __forceinline__ RequestedFilter RequestedFilterOf(const SampleParams& p, int64_t output, int64_t row) {
  const int top_k = ValueOf(p.filter.top_k, p.filter.top_k_by_output ? output : row);
  RequestedFilter requested;
  requested.count = top_k >= int(p.vocab) ? UNLIMITED : uint64_t(max(top_k, 1));
  requested.top_p = ValueOf(p.filter.top_p, p.filter.top_p_by_output ? output : row);
  requested.by_mass = p.filter.filter == Filter::kBoth && !(requested.top_p >= 1.f);
  requested.top_k_first = p.filter.filter == Filter::kTopKFirst && !(requested.top_p >= 1.f);
  return requested;
}

/// Prefetch a chunk into L2.
__device__ __forceinline__ void PrefetchChunk(const SegmentSource& source, int chunk) {
  const int begin = chunk * SEGMENT;
  if (threadIdx.x % 32 == 0 && begin + 4 <= source.vocab && source.aligned) {
    ptx::PrefetchL2(source.row + begin, min(SEGMENT, source.vocab - begin) / 4 * 16);
  }
}

/// Load a chunk, by one warp; columns past the end are 0.
__device__ __forceinline__ void LoadChunk(const SegmentSource& source, int chunk, float (&x)[VECTORS][4]) {
  const int begin = SegmentSource::Column(chunk, 0);
  if (source.aligned && (chunk + 1) * SEGMENT <= source.vocab) {
    const uint64_t policy = ptx::OncePolicy();
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) ptx::LoadOnce(source.row + begin + j * WARP_COLUMNS, policy, x[j]);
  } else {
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = begin + j * WARP_COLUMNS + e;
        x[j][e] = i < source.vocab ? source.row[i] : 0.f;
      }
    }
  }
}

/// Append the columns of a chunk whose bits are set in `near` to the list, if they fit. By one warp.
__device__ __forceinline__ void AppendChunk(const float (&x)[VECTORS][4], uint32_t near, int chunk,
                                            OnePassShared& shared) {
  const int lane = threadIdx.x % 32;
  const uint32_t own = __popc(near), through = WarpInclusiveScan(own), all = __shfl_sync(ALL_LANES, through, 31);
  uint32_t begin = 0;
  if (lane == 0) begin = atomicAdd(&shared.listed, all);
  begin = __shfl_sync(ALL_LANES, begin, 0);
  if (begin + all > CANDIDATES) {
    if (lane == 0) atomicMin(&shared.fitting, begin);
    return;
  }
  uint32_t* key = shared.keys + begin + through - own;
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (near >> (j * 4 + e) & 1) *key++ = Bits(x[j][e]);
    }
  }
#pragma unroll 1
  for (uint32_t i = lane; i < all; i += 32) shared.chunks[begin + i] = uint16_t(chunk);
}

/// List the columns within a range and sum the columns above it. BELOW: also sum the quanta of the rest, for the total
/// of the row. TIES: columns equal to `tie`, the lower end of the range, are counted instead of listed and taken as
/// kept, unless `tie` is negative.
template <bool BELOW, bool TIES, int THREADS = TOP_THREADS>
__device__ __forceinline__ void CollectCandidates(const SegmentSource& source, const WeightRange& range, float tie,
                                                  OnePassShared& shared) {
  const int lane = threadIdx.x % 32, warps = ptx::ClusterSize() * (THREADS / 32);
  const int mine = ptx::ClusterRank() * (THREADS / 32) + threadIdx.x / 32, chunks = source.Count();
  const Scale scale(ONE);
  const float below_low = FromBits(Bits(range.low) - 1), below_high = FromBits(Bits(range.high) - 1);
  uint32_t* const chunk_quanta = ptx::InBlock(shared.chunk_quanta, 0);
  uint64_t above = 0, below = 0;
  uint32_t count = 0, tied = 0;
#pragma unroll 1
  for (int chunk = mine; chunk < chunks; chunk += warps) {
    float x[VECTORS][4];
    LoadChunk(source, chunk, x);
    if (THREADS > TOP_THREADS || ptx::ClusterSize() > 1)
      PrefetchChunk(source, chunk + warps);  // few rows: not enough loads in flight otherwise
    // The sign bits of differences mark the columns (NaN has none). Adding 2^23 rounds to an integer in the lowest bits
    // of the float: the quanta of light columns, without conversions and 64-bit sums.
    uint32_t near = 0, higher = 0, sum = 0, equal = 0;
    float heaviest = 0.f;
#pragma unroll
    for (int j = VECTORS - 1; j >= 0; --j) {
#pragma unroll
      for (int e = 3; e >= 0; --e) {
        const float value = x[j][e];
        higher = __funnelshift_l(Bits(below_high - value), higher, 1);
        near = __funnelshift_l(Bits(below_low - value), near, 1);
        heaviest = fmaxf(heaviest, value);
        sum += Bits(fmaf(value > below_high ? value : 0.f, 0x1p31f, 0x1p23f));
        if (BELOW && !(value > below_low)) below += QuantumOf(Positive(value), scale);
      }
    }
    near &= ~higher;
    if (TIES && tie >= 0.f) {
#pragma unroll
      for (int i = 0; i < 4 * VECTORS; ++i) {
        if (x[i / 4][i % 4] == tie) ++equal, near &= ~(1u << i);
      }
    }
    uint64_t quanta = sum - 4 * VECTORS * Bits(0x1p23f);
    if (__any_sync(ALL_LANES, heaviest >= 0x1p-8f)) {
      quanta = 0;
#pragma unroll
      for (int j = 0; j < VECTORS; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (x[j][e] >= range.high) quanta += QuantumOf(x[j][e], scale);
        }
      }
    }
    quanta = WarpMass(quanta);
    above += quanta;
    count += ptx::ReduceAdd(__popc(higher));
    uint32_t of_ties = 0;
    if constexpr (TIES) {
      equal = ptx::ReduceAdd(equal);
      tied += equal, of_ties = equal * QuantumOf(range.low, scale);
    }
    if (lane == 0) chunk_quanta[chunk] = uint32_t(quanta) + of_ties;
    if (__any_sync(ALL_LANES, near != 0)) AppendChunk(x, near, chunk, shared);
  }
  if constexpr (BELOW) below = WarpSum(below);
  if (lane == 0) {
    ptx::InBlock(shared.quanta_above, 0)[mine] = above;
    ptx::InBlock(shared.count_above, 0)[mine] = count;
    if constexpr (BELOW) ptx::InBlock(shared.quanta_below, 0)[mine] = below;
    if constexpr (TIES) ptx::InBlock(shared.count_tied, 0)[mine] = tied;
  }
}

/// Send the list of this block to the leader.
template <int THREADS = TOP_THREADS>
__device__ __forceinline__ void SendList(OnePassShared& shared) {
  const int thread = threadIdx.x;
  __syncthreads();
  const uint32_t count = shared.listed;
  if (thread == 0) shared.begin = atomicAdd(ptx::InBlock(&shared.sent, 0), count);
  __syncthreads();
  const uint32_t begin = shared.begin;
  if (begin + count > CANDIDATES) return;
  uint32_t* const keys = ptx::InBlock(shared.keys, 0) + (CANDIDATES - count - begin);
  uint16_t* const chunks = ptx::InBlock(shared.chunks, 0) + (CANDIDATES - count - begin);
#pragma unroll 1
  for (int i = thread; i < int(count); i += THREADS) {
    keys[i] = shared.keys[i];
    chunks[i] = shared.chunks[i];
  }
}

/// The leader's view of the list.
template <int THREADS = TOP_THREADS>
struct CandidateList {
  const OnePassShared& shared;
  int front, count;  // the first `front` entries are the leader's own

  __device__ __forceinline__ int At(int i) const { return i < front ? i : i + CANDIDATES - count; }

  /// Return this lane's part of the quanta of the whole list.
  __device__ __forceinline__ uint64_t QuantaOfLane() const {
    uint64_t quanta = 0;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < count; i += 32) quanta += QuantumOf(FromBits(shared.keys[At(i)]), Scale(ONE));
    return quanta;
  }

  /// Call f(keys, places) for four independent entries at a time; a key of 0 is no entry. Lanes read entries far apart:
  /// neighbours in the list belong to one chunk, and atomics to one address are serialised.
  template <typename F>
  __device__ __forceinline__ void ForEach(const F& f) const {
    const int each = (count + 31) / 32 | 1, first = threadIdx.x % 32 * each;  // odd: avoids bank conflicts
#pragma unroll 1
    for (int base = threadIdx.x / 32; base < each; base += 4 * (THREADS / 32)) {
      uint32_t key[4];
      int place[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = base + j * (THREADS / 32);
        const bool is_any = i < each && first + i < count;
        place[j] = At(is_any ? first + i : 0);
        key[j] = is_any ? shared.keys[place[j]] : 0;
      }
      f(key, place);
    }
  }
};

/// Count the entries within the range in bins. Returns the columns and quanta of the bins before this thread's, and the
/// quanta of its own bins.
template <int THREADS>
__device__ __forceinline__ void FillBins(const CandidateList<THREADS>& list, const KeyRange& range, int shift,
                                         uint64_t& columns, uint64_t& before, uint64_t (&own)[CANDIDATE_BINS / THREADS],
                                         CandidateBins& bins, ScanShared& scan) {
  const int thread = threadIdx.x;
  const Scale scale(ONE);
  const bool is_light = range.high < Bits(0x1p-12f);  // the quanta of the whole list stay below 2^32
#pragma unroll 1
  for (int i = thread; i < CANDIDATE_BINS; i += THREADS) bins.sums[0][i] = bins.sums[1][i] = bins.sums[2][i] = 0;
  if (thread == 0) bins.bin = -1, bins.last_bin = CANDIDATE_BINS, bins.count_few = 0;
  __syncthreads();
  list.ForEach([&](const uint32_t (&key)[4], const int (&)[4]) {
    uint32_t bin[4], quantum[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bin[j] = range.Contains(key[j]) ? range.Bin(key[j], shift) : CANDIDATE_BINS;
      quantum[j] = QuantumOf(FromBits(key[j]), scale);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (bin[j] != CANDIDATE_BINS) {
        atomicAdd(bins.sums[0] + bin[j], 1u);
        atomicAdd(bins.sums[1] + bin[j], is_light ? quantum[j] : quantum[j] & 0xFFFFu);
        if (!is_light) atomicAdd(bins.sums[2] + bin[j], quantum[j] >> 16);
      }
    }
  });
  __syncthreads();
  constexpr int BINS = CANDIDATE_BINS / THREADS;  // bins per thread
  constexpr int COUNT = 48;                       // bits for quanta; the upper bits count columns
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < BINS; ++i) {
    own[i] = bins.sums[1][BINS * thread + i] + (uint64_t{bins.sums[2][BINS * thread + i]} << 16);
    sum += own[i] + (uint64_t{bins.sums[0][BINS * thread + i]} << COUNT);
  }
  sum = BlockBefore<THREADS>(sum, scan);
  columns = sum >> COUNT, before = sum & ((uint64_t{1} << COUNT) - 1);
}

/// Return the smallest kept key of the list within the range and the quanta from it on; `count` and `quanta` are those
/// of the columns above the range and are within the limits. Histograms narrow the range to a few keys, which every
/// warp ranks.
template <int THREADS>
__device__ __forceinline__ KeyThreshold FindInList(const CandidateList<THREADS>& list, KeyRange range, uint32_t count,
                                                   uint64_t quanta, const FilterLimits& limits, CandidateBins& bins,
                                                   ScanShared& scan) {
  constexpr int BINS = CANDIDATE_BINS / THREADS;
  const int thread = threadIdx.x, lane = thread % 32;
  const Scale scale(ONE);
  uint32_t within;
#pragma unroll 1
  while (true) {
    const int shift = range.Shift(CANDIDATE_BITS);
    uint64_t columns, before, own[BINS];
    FillBins(list, range, shift, columns, before, own, bins, scan);
    columns += count, before += quanta;
#pragma unroll
    for (int i = 0; i < BINS; ++i) {
      const uint32_t mine = bins.sums[0][BINS * thread + i];
      const bool starts = columns < limits.count && before < limits.quanta;
      if (starts && (columns + mine >= limits.count || before + own[i] >= limits.quanta)) {
        bins.bin = BINS * thread + i, bins.count_before = uint32_t(columns), bins.count_within = mine;
        bins.quanta_before = before, bins.quanta_through = before + own[i];
      } else if (starts && BINS * thread + i == CANDIDATE_BINS - 1) {
        bins.quanta_through = before + own[i];  // the limits are not reached within the range
      }
      columns += mine, before += own[i];
    }
    __syncthreads();
    if (bins.bin < 0) return {range.low, bins.quanta_through};
    count = bins.count_before, quanta = bins.quanta_before, within = bins.count_within;
    range.Narrow(uint32_t(bins.bin), shift);
    if (shift == 0) return {range.high, bins.quanta_through};
    if (within <= FEW_CANDIDATES) break;
    __syncthreads();
  }

  list.ForEach([&](const uint32_t (&key)[4], const int (&)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (range.Contains(key[j])) bins.few[atomicAdd(&bins.count_few, 1u)] = key[j];
    }
  });
  __syncthreads();
  const uint32_t key = lane < int(within) ? bins.few[lane] : 0, quantum = QuantumOf(FromBits(key), scale);
#pragma unroll 4
  for (int j = 0; j < int(within); ++j) {
    const uint32_t other = __shfl_sync(ALL_LANES, key, j), of_other = __shfl_sync(ALL_LANES, quantum, j);
    if (other > key) ++count, quanta += of_other;
  }
  const bool is_kept = key != 0 && count < limits.count && quanta < limits.quanta;
  const uint32_t threshold = ptx::ReduceMin(is_kept ? key : ~uint32_t{0});
  // The lane that holds the threshold knows the quanta above it.
  const uint32_t equal = __ballot_sync(ALL_LANES, key == threshold);
  return {threshold, __shfl_sync(ALL_LANES, quanta + uint64_t{quantum} * __popc(equal), __ffs(equal) - 1)};
}

constexpr int NOT_FOUND = -3;

/// Estimate a narrower range where only a part of the columns within could be listed; that part serves as a sample.
/// `expected` becomes the expected number of columns in the new range.
template <int THREADS>
__device__ __forceinline__ WeightRange Narrow(const CandidateList<THREADS>& part, float all, const KeyRange& range,
                                              uint32_t count, uint64_t quanta, const FilterLimits& limits,
                                              float& expected, CandidateBins& bins, ScanShared& scan) {
  constexpr int BINS = CANDIDATE_BINS / THREADS;
  const int thread = threadIdx.x, shift = range.Shift(CANDIDATE_BITS);
  uint64_t columns, before, own[BINS];
  FillBins(part, range, shift, columns, before, own, bins, scan);
  const float each = all / float(part.count), heaviest = float(QuantumOf(FromBits(range.high), Scale(ONE)));
  uint32_t through[BINS];
#pragma unroll
  for (int i = 0; i < BINS; ++i) {
    columns += bins.sums[0][BINS * thread + i], before += own[i];
    through[i] = uint32_t(columns);
    // Distance to each limit at the end of the bin.
    const float few = float(columns), light = float(before);
    const float fewer = limits.count == UNLIMITED ? INFINITY : float(limits.count) - float(count) - each * few;
    const float lighter = limits.quanta == UNLIMITED ? INFINITY : float(limits.quanta - quanta) - each * light;
    const float of_count = each * each * few, of_quanta = each * each * light * heaviest;
    if (IsSignificant(-fewer, of_count) || IsSignificant(-lighter, of_quanta))
      atomicMin(&bins.last_bin, BINS * thread + i);
    if (IsSignificant(fewer, of_count) && IsSignificant(lighter, of_quanta)) atomicMax(&bins.bin, BINS * thread + i);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < BINS; ++i) {
    if (BINS * thread + i == bins.bin) bins.count_before = through[i];
    if (BINS * thread + i == min(bins.last_bin, CANDIDATE_BINS - 1)) bins.count_within = through[i];
  }
  __syncthreads();
  expected = each * (float(bins.count_within) - (bins.bin < 0 ? 0.f : float(bins.count_before)));
  const uint32_t kept = uint32_t(bins.bin + 1) << shift, width = uint32_t(bins.last_bin + 1) << shift;
  const uint32_t top = kept > range.high - range.low ? range.low : range.high - kept;
  const bool is_low = bins.last_bin == CANDIDATE_BINS || width > range.high - range.low;
  return {FromBits(is_low ? range.low : range.high - width + 1), FromBits(top + 1)};
}

/// True if the quanta are certainly relative to 1 and their sum fits 32 bits.
__device__ __forceinline__ bool IsDrawable(const KeyThreshold& result) {
  const uint64_t total = result.kept_quanta;
  return total < MAX_KEPT_QUANTA && (total >= MAX_KEPT_QUANTA >> 4 || FromBits(result.key) >= 0x1p-24f);
}

/// Sample a column from the key of `result` on, by the leader: returns the column to one thread, ELSEWHERE to the
/// others.
template <int THREADS>
__device__ __forceinline__ int DrawFromList(const SegmentSource& source, const CandidateList<THREADS>& list,
                                            const KeyThreshold& result, OnePassShared& shared) {
  const int lane = threadIdx.x % 32;
  const Scale scale(ONE);
  list.ForEach([&](const uint32_t (&key)[4], const int (&place)[4]) {
    int chunk[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) chunk[j] = shared.chunks[place[j]];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (key[j] >= result.key) atomicAdd(shared.chunk_quanta + chunk[j], QuantumOf(FromBits(key[j]), scale));
    }
  });
  __syncthreads();
  // Every warp finds the chunk that holds the target: each lane sums some chunks.
  const int chunks = source.Count(), each = (chunks + 31) / 32, first = lane * each;
  uint32_t own = 0;
#pragma unroll 4
  for (int c = first; c < min(first + each, chunks); ++c) own += shared.chunk_quanta[c];
  const uint32_t through = WarpInclusiveScan(own);
  uint32_t target = uint32_t(TargetOf(shared.random, result.kept_quanta));
  const int owner = __ffs(__ballot_sync(ALL_LANES, through >= target)) - 1;
  target -= __shfl_sync(ALL_LANES, through - own, owner);
  int chunk = owner * each;
  while (target > shared.chunk_quanta[chunk]) target -= shared.chunk_quanta[chunk++];
  static_assert(SEGMENT <= 4 * THREADS);
  const int i = chunk * SEGMENT + threadIdx.x * 4;
  float x[4] = {};
  if (i < source.vocab && threadIdx.x < SEGMENT / 4) source.LoadFour(i, 0.f, x);
  const uint32_t quanta = uint32_t(KeptQuanta(FromBits(result.key), scale, x));
  const uint32_t before = BlockBefore<THREADS>(quanta, shared.scan);
  const bool is_mine = target > before && target <= before + quanta;
  return is_mine ? i + ColumnOfQuanta(x, target - before, scale) : ELSEWHERE;
}

}  // namespace sampling
}  // namespace flashinfer
