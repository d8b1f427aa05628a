// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters of experts on the CPU; parameters in moe/lora.h. Rows of the result over threads.
//   test  pytest tests/fused_moe/test_bgmv_moe.py
#pragma once
#include <vector>

#include "../lora.h"
#include "../../cpu/parallel.h"
#include "../../cpu/vec.h"

namespace flashinfer {
namespace cpu {

inline float NumberAt(const BgmvNumbers& x, int64_t i) {
  switch (x.type) {
    case BgmvFloat::kFloat:
      return static_cast<const float*>(x.data)[i];
    case BgmvFloat::kHalf:
      return float(static_cast<const float16*>(x.data)[i]);
    default:
      return float(static_cast<const bfloat16*>(x.data)[i]);
  }
}

inline void SetNumber(const BgmvNumbers& x, int64_t i, float value) {
  switch (x.type) {
    case BgmvFloat::kFloat:
      static_cast<float*>(x.data)[i] = value;
      break;
    case BgmvFloat::kHalf:
      static_cast<float16*>(x.data)[i] = float16(value);
      break;
    default:
      static_cast<bfloat16*>(x.data)[i] = bfloat16(value);
  }
}

/// Return the dot product of a row of a matrix and a vector, both with n elements.
template <typename W, typename X>
inline float Dot(const W* w, const X* x, int64_t n) {
  RunningSum sum;
  ForEachVec(n, [&](int64_t i, auto lanes) { sum.Add(Load(w + i, lanes) * Load(x + i, lanes)); });
  return sum.Total();
}

/// Add weight * B x[slice, pair] to `sums`; return false if the pair is skipped.
template <typename W>
inline bool AddPair(const BgmvExpandParams& p, int64_t slice, int64_t pair, float weight, std::vector<float>& x,
                    std::vector<float>& sums) {
  const W* const matrix = p.by.Matrix<W>(slice, pair);
  if (matrix == nullptr) return false;
  const int64_t first = slice * p.x_slice_stride + pair * p.rank;
  for (int64_t r = 0; r < p.rank; ++r) x[r] = NumberAt(p.x, first + r);
  for (int64_t i = 0; i < p.columns; ++i) sums[i] += weight * Dot(matrix + i * p.rank, x.data(), p.rank);
  return true;
}

/// The pairs of each token, ascending.
struct PairsByToken {
  std::vector<int64_t> order,
      offsets;  // as in BgmvExpandParams; empty: they are in the parameters, or follow from them

  explicit PairsByToken(const BgmvExpandParams& p) {
    const BgmvPairs& by = p.by;
    if (!p.finalize || p.order != nullptr || !by.token_ids.exists()) return;
    const auto is_token = [&](int64_t pair) { return by.token_ids[pair] >= 0 && by.token_ids[pair] < by.tokens; };
    offsets.resize(by.tokens + 2);
    for (int64_t i = 0; i < by.pairs; ++i) offsets[is_token(i) ? by.token_ids[i] + 2 : 0] += is_token(i);
    for (int64_t t = 1; t < by.tokens + 2; ++t) offsets[t] += offsets[t - 1];
    order.resize(by.pairs);
    for (int64_t i = 0; i < by.pairs; ++i) {
      if (is_token(i)) order[offsets[by.token_ids[i] + 1]++] = i;  // the next token's offset becomes its own
    }
  }
};

}  // namespace cpu

template <typename W>
Status BgmvMoeShrink(const BgmvShrinkParams& p, Stream) {
  using namespace cpu;
  ParallelFor(p.by.slices * p.by.pairs, p.rank * p.columns, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t pair = i % p.by.pairs, row = p.Row(pair);
      const W* const matrix = p.by.Matrix<W>(i / p.by.pairs, pair);
      if (matrix == nullptr || row < 0) {
        const bool is_read = p.overwrites && p.by.IsPair(pair);
        for (int64_t r = 0; is_read && r < p.rank; ++r) SetNumber(p.y, i * p.rank + r, 0.f);
        continue;
      }
      const W* const x = static_cast<const W*>(p.x) + row * p.x_stride;
      for (int64_t r = 0; r < p.rank; ++r) {
        const int64_t at = i * p.rank + r;
        SetNumber(p.y, at, (p.overwrites ? 0.f : NumberAt(p.y, at)) + Dot(matrix + r * p.columns, x, p.columns));
      }
    }
  });
  return 0;
}

template <typename W>
Status BgmvMoeExpand(const BgmvExpandParams& p, Stream) {
  using namespace cpu;
  const int64_t rows = p.finalize ? p.by.tokens : p.by.pairs;
  const PairsByToken sorted(p);
  const bool is_sorted_here = !sorted.offsets.empty();
  const int64_t* const order = is_sorted_here ? sorted.order.data() : p.order;
  const int64_t* const offsets = is_sorted_here ? sorted.offsets.data() : p.offsets;
  ParallelFor(p.by.slices * rows, p.rank * p.columns, [&](int64_t begin, int64_t end) {
    std::vector<float> x(p.rank), sums(p.columns);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slice = i / rows, row = i % rows, at = row * p.y_stride + p.ColumnOf(slice, 0);
      std::fill(sums.begin(), sums.end(), 0.f);
      bool is_served = false;
      if (!p.finalize) {
        is_served = AddPair<W>(p, slice, row, 1.f, x, sums);
      } else {
        const int64_t last = offsets == nullptr ? (row + 1) * p.by.top_k : offsets[row + 1];
        for (int64_t j = offsets == nullptr ? row * p.by.top_k : offsets[row]; j < last; ++j) {
          const int64_t pair = offsets == nullptr ? j : order[j];
          is_served |= AddPair<W>(p, slice, pair, p.weights == nullptr ? 1.f : p.weights[pair], x, sums);
        }
      }
      if (!is_served && !p.overwrites) continue;
      const bool is_added = p.finalize && !p.overwrites;
      for (int64_t c = 0; c < p.columns; ++c) {
        SetNumber(p.y, at + c, (is_added ? NumberAt(p.y, at + c) : 0.f) + p.scale * sums[c]);
      }
      for (int64_t c = p.columns; c < p.Width(slice); ++c) SetNumber(p.y, at + c, 0.f);
    }
  });
  return 0;
}

}  // namespace flashinfer
