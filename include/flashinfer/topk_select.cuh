// SPDX-License-Identifier: Apache-2.0
// Selection of the k largest of many keys by a block: histograms narrow the range that contains the k-th key, then the
// result is listed in order. A key is an unsigned number with the order of the elements. All threads of the block take
// part.
#pragma once
#include "utils.cuh"
#include "warp.cuh"

namespace flashinfer {
namespace topk {

constexpr int BIN_BITS = 11, BINS = 1 << BIN_BITS;
constexpr uint32_t NAN_KEY = 0xFFC00000u;  // the largest key, above that of infinity

struct Scratch {
  uint32_t bins[BINS];
  uint32_t warps[2][32];         // a number or two of each warp
  uint32_t bin, larger, inside;  // what FindBin found
  uint32_t count, taken;
  uint32_t cluster_counts[8];
};

__device__ __forceinline__ uint32_t KeyOf(float x) {
  if (x != x) return NAN_KEY;
  const uint32_t bits = __float_as_uint(x + 0.f);  // -0 becomes 0: they are equal
  return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float FloatOf(uint32_t key) {
  return __uint_as_float(key ^ (uint32_t(~int32_t(key) >> 31) | 0x80000000u));
}

/// Compute the smallest and largest number of the block, for every thread. Ends with a barrier.
__device__ __forceinline__ void BlockRange(Scratch& s, uint32_t& low, uint32_t& high) {
  for (int offset = 16; offset > 0; offset /= 2) {
    low = min(low, __shfl_xor_sync(ALL_LANES, low, offset));
    high = max(high, __shfl_xor_sync(ALL_LANES, high, offset));
  }
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) s.warps[0][warp] = low, s.warps[1][warp] = high;
  __syncthreads();
  for (int i = 0; i < int(blockDim.x) / 32; ++i) low = min(low, s.warps[0][i]), high = max(high, s.warps[1][i]);
  __syncthreads();
}

/// Return the exclusive prefix sum of `x` over the threads; `total` is the sum of the block.
__device__ __forceinline__ uint32_t SumBefore(Scratch& s, uint32_t x, uint32_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t sum = WarpInclusiveScan(x);
  if (lane == 31) s.warps[0][warp] = sum;
  __syncthreads();
  uint32_t before = sum - x;
  total = 0;
  for (int i = 0; i < int(blockDim.x) / 32; ++i) {
    if (i < warp) before += s.warps[0][i];
    total += s.warps[0][i];
  }
  __syncthreads();
  return before;
}

__device__ __forceinline__ void ClearBins(Scratch& s) {
  for (int i = threadIdx.x; i < BINS; i += blockDim.x) s.bins[i] = 0;
  __syncthreads();
}

/// Add 1 to `bin`, or nothing if `bin` is negative. Called by the whole warp. Lanes with the same bin, as in a row of
/// equal values, make one addition, because 32 additions to one address would serialise.
__device__ __forceinline__ void CountInBin(Scratch& s, int bin) {
  int agree;
  __match_all_sync(ALL_LANES, bin, &agree);
  if (bin < 0) return;
  if (!agree) {
    atomicAdd(&s.bins[bin], 1u);
  } else if (threadIdx.x % 32 == 0) {
    atomicAdd(&s.bins[bin], 32u);
  }
}

/// Find the bin that holds the `want`-th number, counted from the last bin down: sets s.bin, s.larger (numbers in later
/// bins) and s.inside. Thread 0 owns the last bins, so that prefix sums over threads run downwards.
__device__ __forceinline__ void FindBin(Scratch& s, uint32_t want) {
  const int each = BINS / blockDim.x, last = BINS - 1 - threadIdx.x * each;
  uint32_t sum = 0, total;
  for (int i = 0; i < each; ++i) sum += s.bins[last - i];
  uint32_t larger = SumBefore(s, sum, total);
  if (larger < want && want <= larger + sum) {
    int bin = last;
    while (larger + s.bins[bin] < want) larger += s.bins[bin--];
    s.bin = bin, s.larger = larger, s.inside = s.bins[bin];
  }
  __syncthreads();
}

/// Result of the search for the k-th largest key: `larger` keys are above low + range and all belong to the k; `inside`
/// keys are within [low, low + range], and either all of them belong to the k or they are equal.
struct Cut {
  uint32_t low, range, larger, inside;
};

/// Search for the `want`-th largest key. `for_each(body)` calls body(valid, key) with whole warps. `want` is at least 1
/// and at most the number of keys. Keys lie in [low, high]; keys that differ only in the `low_bits` last bits count as
/// equal. Takes at most three iterations.
template <typename ForEach>
__device__ __forceinline__ Cut FindCut(Scratch& s, uint32_t low, uint32_t high, uint32_t want, int low_bits,
                                       const ForEach& for_each) {
  Cut cut{low, high - low, 0, 0};
  int shift = max(32 - __clz(cut.range) - BIN_BITS, low_bits);
  while (true) {
    ClearBins(s);
    for_each([&](bool valid, uint32_t key) {
      const uint32_t offset = key - cut.low;
      CountInBin(s, valid && offset <= cut.range ? int(offset >> shift) : -1);
    });
    __syncthreads();
    FindBin(s, want - cut.larger);
    const uint32_t begin = s.bin << shift;
    cut.low += begin;
    cut.range = min(cut.range - begin, (1u << shift) - 1);
    cut.larger += s.larger;
    cut.inside = s.inside;
    if (shift == low_bits || cut.larger + cut.inside == want) return cut;
    shift = max(shift - BIN_BITS, low_bits);
  }
}

/// Criterion that decides which elements belong to the k largest.
struct Selection {
  uint32_t low = 0, range = ~uint32_t{0};  // keys above low + range do, keys below low do not,
  uint32_t tie = 0;                        // and those in between if their tie number is at least this
  uint32_t last_index = 0;
  bool prefer_large = true;

  /// Among equal elements the one with the larger number goes first.
  __device__ __forceinline__ uint32_t TieOf(uint32_t index) const { return prefer_large ? index : last_index - index; }
  __device__ __forceinline__ bool Takes(uint32_t key, uint32_t index) const {
    return key >= low && (key - low > range || TieOf(index) >= tie);
  }
};

/// Select the `want` largest elements, with keys in [low, high] and indices below `length`. `for_each(body)` calls
/// body(valid, key, index) with whole warps.
template <typename ForEach>
__device__ __forceinline__ Selection SelectLargest(Scratch& s, uint32_t low, uint32_t high, uint32_t want, int low_bits,
                                                   int length, bool prefer_large, const ForEach& for_each) {
  const Cut cut = FindCut(s, low, high, want, low_bits, [&](const auto& count) {
    for_each([&](bool valid, uint32_t key, uint32_t) { count(valid, key); });
  });
  Selection chosen;
  chosen.low = cut.low, chosen.range = cut.range;
  chosen.last_index = uint32_t(length - 1), chosen.prefer_large = prefer_large;
  if (cut.larger + cut.inside > want) {  // only some of the equal elements are selected
    const Cut ties = FindCut(s, 0u, chosen.last_index, want - cut.larger, 0, [&](const auto& count) {
      for_each([&](bool valid, uint32_t key, uint32_t index) {
        count(valid && key - cut.low <= cut.range, chosen.TieOf(index));
      });
    });
    chosen.tie = ties.low;
  }
  return chosen;
}

/// Sort `perm[0, n)` by `order_of(perm[i])`, numbers that are all different. Every comparison puts the smaller first,
/// so those with places past the end can be left out.
template <typename OrderOf>
__device__ __forceinline__ void SortInPlace(uint16_t* perm, int n, const OrderOf& order_of) {
  const auto compare = [&](int a, int b) {
    if (b >= n) return;
    const uint16_t first = perm[a], second = perm[b];
    if (order_of(first) > order_of(second)) perm[a] = second, perm[b] = first;
  };
  int pairs = 1;
  while (2 * pairs < n) pairs *= 2;
  for (int half = 1; half <= pairs; half *= 2) {  // merges sorted pieces of `half`, the second one read backwards
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
      const int within = i & (half - 1), begin = 2 * (i - within);
      compare(begin + within, begin + 2 * half - 1 - within);
    }
    __syncthreads();
    for (int stride = half / 2; stride > 0; stride /= 2) {
      for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        const int within = i & (stride - 1), at = 2 * (i - within) + within;
        compare(at, at + stride);
      }
      __syncthreads();
    }
  }
}

constexpr uint32_t MAX_RANKED = 128;  // elements of a bin up to which each counts those before it

/// Call emit(slot, i) for each i in [0, n) with takes(i). `slot` is the number of such i with a smaller order_of(i).
/// The upper half of that 64-bit number picks a bin, and the lower settles what shares a bin. `perm` has a place for
/// each.
template <typename Takes, typename OrderOf, typename Emit>
__device__ __forceinline__ void EmitInOrder(Scratch& s, uint16_t* perm, int n, const Takes& takes,
                                            const OrderOf& order_of, const Emit& emit) {
  uint32_t low = ~uint32_t{0}, high = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const uint32_t major = uint32_t(order_of(i) >> 32);
    if (takes(i)) low = min(low, major), high = max(high, major);
  }
  BlockRange(s, low, high);
  const int shift = max(32 - __clz(high - low) - BIN_BITS, 0);
  const auto bin_of = [&](int i) { return (uint32_t(order_of(i) >> 32) - low) >> shift; };
  ClearBins(s);
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    if (takes(i)) atomicAdd(&s.bins[bin_of(i)], 1u);
  }
  __syncthreads();

  const int each = BINS / blockDim.x, first = threadIdx.x * each;
  uint32_t sum = 0, largest = 0, total, smallest = 0;
  for (int i = first; i < first + each; ++i) sum += s.bins[i], largest = max(largest, s.bins[i]);
  uint32_t begin = SumBefore(s, sum, total);
  for (int i = first; i < first + each; ++i) {
    const uint32_t size = s.bins[i];
    s.bins[i] = begin;
    begin += size;
  }
  BlockRange(s, smallest, largest);
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    if (takes(i)) perm[atomicAdd(&s.bins[bin_of(i)], 1u)] = uint16_t(i);
  }
  __syncthreads();  // a bin now holds its end, which is where the next one begins

  if (largest > MAX_RANKED) {
    SortInPlace(perm, int(total), order_of);
    for (int slot = threadIdx.x; slot < int(total); slot += blockDim.x) emit(slot, perm[slot]);
    return;
  }
  for (int at = threadIdx.x; at < int(total); at += blockDim.x) {
    const int i = perm[at];
    const uint32_t bin = bin_of(i), end = s.bins[bin];
    const uint64_t order = order_of(i);
    uint32_t slot = bin == 0 ? 0 : s.bins[bin - 1];
    for (uint32_t other = slot, stop = end; other < stop; ++other) slot += order_of(perm[other]) < order;
    emit(slot, i);
  }
}

}  // namespace topk
}  // namespace flashinfer
