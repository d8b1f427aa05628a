// SPDX-License-Identifier: Apache-2.0
// Fallback of filter_rows.cuh for rows with too many survivors to list, or with a wrong estimate: a fine estimate
// gives new bounds (threshold_estimate_rows.cuh), only uncertain survivors are listed, ties are counted, columns
// certain to be kept are summed (row_chunks.cuh), and the row is read again to be written. If that fails too, the
// threshold is searched in the row (threshold_search.cuh).
#pragma once
#include "filter_rows.cuh"

namespace flashinfer {
namespace sampling {

constexpr float SPLIT_DEVIATIONS = 3.5f;
constexpr float SPLIT_FILL = 0.9f;    // fraction of the list to plan for: there may be more columns than estimated
constexpr float SPLIT_WANTED = 0.7f;  // fraction of that to ask the estimator for
static_assert(sizeof(SearchShared) <= FILTER_BYTES);

/// Search the threshold in the row, and write the row. The blocks need nothing else in `shared` any more.
template <typename T, bool SIGNED>
__device__ __noinline__ void SearchRow(const RowParams<T>& p, int64_t row, const RowSearch<SIGNED> search,
                                       SearchRange range) {
  const RowChunks<T, SIGNED> chunks(p, row);
  ptx::ClusterSync();
  if (!range.is_found) range = search.Find(RowKeys<T, SIGNED>{chunks}, range);
  ptx::ClusterArrive();
  chunks.Copy(KeptColumns<SIGNED>(range.threshold, search.scale, range.mass));
  ptx::ClusterWait();  // until other blocks have read this block's shared memory
}

/// Sum the block's weights above `high`.
template <typename T>
__device__ __noinline__ void SumAbove(const RowParams<T>& p, int64_t row, uint32_t high, const Scale scale,
                                      ColumnSums& sums) {
  const RowChunks<T, false> chunks(p, row);
  if (threadIdx.x == 0) sums = {};
  __syncthreads();
  ColumnSums above{};
  RowKeys<T, false>{chunks}.ForEach([&](uint32_t key) {
    if (key > high) above.template Add<false>(FromBits(key), scale);
  });
  above.AddTo(sums);
  __syncthreads();
}

template <typename T, bool SIGNED>
struct SplitRowFilter : RowFilter<T, SIGNED> {
  using Base = RowFilter<T, SIGNED>;
  using Base::Base, Base::LOWEST, Base::p, Base::row, Base::chunks, Base::shared, Base::capacity, Base::Lane,
      Base::List;

  /// Step 2 where there are too many survivors: columns above the bounds are summed, the others are listed, except ties
  /// at the lower bound. Also finds the largest key.
  __device__ __forceinline__ void ReadSplit(const TightBounds& bounds, bool is_listed) {
    CertainSums sums(bounds.high, BiasedExponent(FromBits(bounds.largest)));
    const float below = FromBits(bounds.low - 1);
    float heaviest = 0.f;
    uint32_t largest = 0, tied = 0;
    chunks.ForEach([&](int c) {
      float x[CHUNK_VECTORS][4];
      const uint32_t valid = chunks.Load(c, x);
      uint32_t higher = 0, bits = 0;
#pragma unroll
      for (int i = CHUNK_COLUMNS - 1; i >= 0; --i) {
        const float value = x[i / 4][i % 4];
        if constexpr (SIGNED) {
          const uint32_t key = valid >> i & 1 ? OrderedKey(value) : 0;
          largest = max(largest, key);
          higher = 2 * higher + (key > bounds.high), bits = 2 * bits + (key >= bounds.low);
        } else {  // sign bits as in Read
          higher = __funnelshift_l(Bits(sums.high - value), higher, 1);
          bits = __funnelshift_l(Bits(below - value), bits, 1);
          heaviest = fmaxf(heaviest, value);
        }
      }
      bits = bits & ~higher & valid, sums.count += __popc(higher);
      if (bounds.has_ties) {
#pragma unroll
        for (int i = 0; i < CHUNK_COLUMNS; ++i) {
          const bool is_tie = (bits >> i & 1) && ColumnKey<SIGNED>(x[i / 4][i % 4]) == bounds.low;
          if (is_tie) ++tied, bits &= ~(1u << i);
        }
      }
      if constexpr (!SIGNED) sums.Add(x);
      if (is_listed) List(c, x, bits, largest);
    });
    largest = ptx::ReduceMax(SIGNED ? largest : Bits(heaviest)), tied = ptx::ReduceAdd(tied);
    if (Lane() == 0) atomicMax(&shared.largest, largest), atomicAdd(&shared.tied, tied);
    sums.AddTo(shared.sums);
  }

  /// All steps.
  __device__ __forceinline__ void Split() {
    const auto share = this->ShareOf();
    const int blocks = ptx::ClusterSize();
    const float room = SPLIT_FILL * float(capacity);
    ptx::ClusterSync();  // every block runs and has read what it was sent
    if (threadIdx.x == 0) {
      shared.listed = shared.largest = shared.pushed = shared.tied = 0, shared.split = LAST_SPLIT;
      shared.room = capacity, shared.certain = shared.uncertain = {};
    }
    TightBounds bounds{{LOWEST, ~0u}, float(chunks.vocab), false, 0};
    if (share.is_limited && chunks.vocab > UNSAMPLED) {
      const TightLimits wanted{{share.Count(), share.Rest()}, SPLIT_WANTED * room, SPLIT_DEVIATIONS};
      bounds = FindTightBounds<SIGNED>(chunks.input, chunks.vocab, wanted, shared.tight);
    }
    if (threadIdx.x == 0) shared.sums = CertainShared::For(bounds.high, BiasedExponent(FromBits(bounds.largest)));
    bool is_listed = share.is_limited && bounds.within <= room;
    __syncthreads();
    if (!SIGNED || is_listed) ReadSplit(bounds, is_listed);
    ptx::ClusterSync();
    uint32_t largest = this->template Exchange<true>(blocks, is_listed);
    const int emax = SIGNED ? ONE : BiasedExponent(FromBits(largest));
    const RowLimits wanted = this->RowLimitsOf(emax);
    if (SIGNED && !is_listed) largest = ~0u;
    const Scale scale(emax);
    const uint32_t high = max(min(bounds.high, largest), bounds.low);
    SearchRange range{{bounds.low, high}, false, 0, 0};
    if (is_listed) {
      if (SIGNED || shared.sums.Has(emax)) {
        if (threadIdx.x == 0) shared.certain = shared.sums.Of(SIGNED ? shared.sums.emax : emax);
      } else {
        SumAbove<T>(p, row, high, scale, shared.certain);
      }
      this->template Report<true>(bounds.low, high, scale);
      ptx::ClusterSync();
      if (ptx::ClusterRank() == 0) this->template Decide<true>(bounds.low, high, bounds.low == LOWEST, wanted, scale);
      ptx::ClusterSync();
      if (shared.is_found) range = {{0, 0}, true, shared.threshold, shared.mass};
    }
    if (!share.is_limited) range = {{0, 0}, SIGNED, 0, 0};
    const RowSearch<SIGNED> search{scale, wanted, SIGNED ? ~0u : largest, *reinterpret_cast<SearchShared*>(&shared)};
    SearchRow<T, SIGNED>(p, row, search, range);
  }
};

/// Not inlined: rarely called, and registers are scarce.
template <typename T, bool SIGNED>
__device__ __noinline__ void FilterRowAsFallback(const RowParams<T>& p, int row, unsigned char* memory) {
  SplitRowFilter<T, SIGNED>(p, row, memory).Split();
}

}  // namespace sampling
}  // namespace flashinfer
