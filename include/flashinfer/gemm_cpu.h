// SPDX-License-Identifier: Apache-2.0
// Matrix products on the CPU; arguments in gemm.h.
// A tile of the result is computed by one thread: chunks of K of both operands are decoded to fp32 and packed, block
// scales multiply the sums of each chunk, and the order of additions does not depend on the number of threads.
//   test  pytest tests/gemm      bench  python benchmarks/bench_gemm.py
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/parallel.h"
#include "gemm.h"
#include "gemm/cpu/stream.h"
#include "gemm/cpu/tile.h"

namespace flashinfer {
namespace gemm {

constexpr int64_t MAX_TILE_M = TILE_ROWS * 40, MAX_TILE_N = 256;
constexpr int64_t PACKED_ROWS = TILE_ROWS * 20;  // rows of a per pass; with panels of b, 560 KiB of L2 (AVX-512)

/// Rows of tokens that are multiplied with one matrix of b.
struct Segment {
  int64_t row, rows;
  int64_t batch;   // matrix of a and d
  int64_t weight;  // matrix of b
};

inline std::vector<Segment> SegmentsOf(const GemmArguments& p) {
  std::vector<Segment> segments;
  const auto add = [&](int64_t row, int64_t rows, int64_t batch, int64_t weight) {
    if (rows > 0) segments.push_back({row, rows, batch, weight});
  };
  if (p.grouping == Grouping::kContiguous) {
    for (int64_t begin = 0, end; begin < p.m; begin = end) {
      for (end = begin + 1; end < p.m && p.groups[end] == p.groups[begin];) ++end;
      if (p.groups[begin] >= 0) add(begin, end - begin, 0, p.groups[begin]);
    }
    return segments;
  }
  for (int64_t i = 0; i < p.batch; ++i) {
    if (p.grouping == Grouping::kBatched) add(0, p.m, i, i);
    if (p.grouping == Grouping::kMasked) add(0, p.groups[i], i, i);
    if (p.grouping == Grouping::kPacked) {
      add(p.groups[i], p.groups[i + 1] - p.groups[i], 0, p.weight_indices ? p.weight_indices[i] : i);
    }
  }
  return segments;
}

/// Sizes of tiles: the largest that leave enough of them for all threads to finish at about the same time. Tokens are
/// packed once per tile along N and weights once per tile along M, so the longer side is halved first.
struct TileSizes {
  int64_t rows = MAX_TILE_M, columns = MAX_TILE_N;
};
inline TileSizes TileSizesOf(const std::vector<Segment>& segments, int64_t n, int64_t threads) {
  TileSizes sizes;
  int64_t longest = 1;
  for (const Segment& s : segments) longest = std::max(longest, s.rows);
  sizes.rows = std::min(sizes.rows, longest);
  const auto count = [&] {
    int64_t strips = 0;
    for (const Segment& s : segments) strips += (s.rows + sizes.rows - 1) / sizes.rows;
    return strips * ((n + sizes.columns - 1) / sizes.columns);
  };
  while (threads > 1 && count() < 2 * threads) {
    if (sizes.rows > sizes.columns && sizes.rows > STREAM_ROWS) {
      sizes.rows = (sizes.rows + 1) / 2;
    } else if (sizes.columns > PANEL_N) {
      sizes.columns /= 2;
    } else {
      break;
    }
  }
  return sizes;
}

inline std::vector<Tile> TilesOf(const GemmArguments& p, const std::vector<Segment>& segments, int64_t threads) {
  const TileSizes sizes = TileSizesOf(segments, p.n, threads);
  const int64_t panels = (p.n + PANEL_N - 1) / PANEL_N, across = (p.n + sizes.columns - 1) / sizes.columns;
  std::vector<Tile> tiles;
  for (const Segment& s : segments) {
    const int64_t down = (s.rows + sizes.rows - 1) / sizes.rows;
    for (int64_t x = 0; x < across; ++x) {
      const int64_t column = panels * x / across * PANEL_N, end = std::min(p.n, panels * (x + 1) / across * PANEL_N);
      for (int64_t y = 0; y < down; ++y) {
        const int64_t row = s.rows * y / down;
        const bool streams = StreamsWeights(p, s.rows);
        tiles.push_back({s.row + row, s.rows * (y + 1) / down - row, column, end - column, s.batch, s.weight, streams});
      }
    }
  }
  return tiles;
}

/// Fill `to` with the scales of rows [row, row + rows) at element k of K, or with ones; `padded` more are zero.
inline void FillScales(const Scale& x, int64_t batch, int64_t row, int64_t rows, int64_t padded, int64_t k, float* to) {
  const bool is_block = IsBlockScale(x);
  const float* from = is_block ? x.data + batch * x.batch_stride + k / x.depth * x.k_stride : nullptr;
  for (int64_t i = 0; i < rows; ++i) to[i] = is_block ? from[(row + i) / x.rows * x.row_stride] : 1.f;
  std::fill(to + rows, to + padded, 0.f);
}

/// Memory of a thread: packed operands, sums and scales of a tile.
struct TileScratch {
  cpu::Scratch a{PACKED_ROWS * PANEL_STRIDE}, b{MAX_TILE_N * CHUNK_K}, sums{MAX_TILE_M * MAX_TILE_N};
  cpu::Scratch row_scale{MAX_TILE_M}, column_scale{MAX_TILE_N};
};

/// Sum the products of a tile over K, by packing both operands.
inline void PackTile(const GemmArguments& p, const Tile& t, const TileScratch& s, int64_t stride) {
  const bool has_blocks = IsBlockScale(p.a_scale) || IsBlockScale(p.b_scale);
  const int64_t depth = IsBlockScale(p.a_scale) ? p.a_scale.depth : p.b_scale.depth;
  const int64_t parts = (t.rows + PACKED_ROWS - 1) / PACKED_ROWS;
  std::fill(&s.sums[0], &s.sums[0] + t.rows * stride, 0.f);
  for (int64_t k = 0, chunk; k < p.k; k += chunk) {
    chunk = std::min(CHUNK_K, p.k - k);
    if (has_blocks) {
      chunk = std::min(chunk, depth - k % depth);
      FillScales(p.a_scale, t.batch, t.row, t.rows, t.rows, k, &s.row_scale[0]);
      FillScales(p.b_scale, t.weight, t.column, t.columns, stride, k, &s.column_scale[0]);
    }
    PackPanels(p.b, t.weight, t.column, t.columns, k, chunk, &s.b[0]);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t row = t.rows * part / parts, rows = t.rows * (part + 1) / parts - row;
      PackRows(p.a, t.batch, t.row + row, rows, k, chunk, &s.a[0], PANEL_STRIDE);
      MultiplyChunk(&s.a[0], &s.b[0], rows, t.columns, chunk, &s.sums[row * stride], stride,
                    has_blocks ? &s.row_scale[row] : nullptr, has_blocks ? &s.column_scale[0] : nullptr);
    }
  }
}

/// Write d = factor * sums + bias + beta * d, rounded once.
template <typename Out>
inline void StoreTile(const GemmArguments& p, const Tile& t, const float* sums, int64_t stride, float factor,
                      const float* bias) {
  for (int64_t i = 0; i < t.rows; ++i) {
    Out* row = const_cast<Out*>(At<Out>(p.d, t.batch, t.row + i, t.column));
    const float* sum = sums + i * stride;
    if (p.d.column_stride == 1) {
      cpu::ForEachVec(t.columns, [&](int64_t j, auto lanes) {
        Vec y = cpu::Load(sum + j, lanes) * factor;
        if (bias != nullptr) y += cpu::Load(bias + j, lanes);
        if (p.beta != 0) y += cpu::Load(row + j, lanes) * p.beta;
        cpu::Store(row + j, y, lanes);
      });
      continue;
    }
    for (int64_t j = 0; j < t.columns; ++j) {
      Out* to = row + j * p.d.column_stride;
      float y = sum[j] * factor;
      if (bias != nullptr) y += bias[j];
      if (p.beta != 0) y += static_cast<float>(*to) * p.beta;
      *to = static_cast<Out>(y);
    }
  }
}

/// Return alpha times the scales of whole tensors.
inline float FactorOf(const GemmArguments& p) {
  float factor = p.alpha;
  for (const Scale* x : {&p.a_scale, &p.b_scale}) {
    if (x->data != nullptr && !IsBlockScale(*x)) factor *= *x->data;
  }
  return factor;
}

inline void DecodeBias(const GemmArguments& p, float* to) {
  WithElement(p.bias_element, [&](auto type) {
    for (int64_t j = 0; j < p.n; ++j) to[j] = static_cast<float>(static_cast<decltype(type)>(p.bias)[j]);
  });
}

inline Status Gemm(const GemmArguments& p, Stream) {
#if defined(_OPENMP)
  const int64_t threads = omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  const int64_t threads = 1;
#endif
  const std::vector<Tile> tiles = TilesOf(p, SegmentsOf(p), threads);
  const float factor = FactorOf(p);
  cpu::Scratch bias(p.n);
  if (p.bias != nullptr) DecodeBias(p, &bias[0]);
  std::atomic<size_t> next{0};
  int64_t products = 0;
  for (const Tile& t : tiles) products += t.rows * t.columns * std::max<int64_t>(p.k, 1);
  const int64_t workers = std::min<int64_t>(threads, tiles.size());
  // Tiles differ in size, so each thread takes the next one when it is done. Products are counted by 16 as elements.
  cpu::ParallelFor(workers, products / 16 / std::max<int64_t>(workers, 1), [&](int64_t, int64_t) {
    static thread_local const TileScratch scratch;  // kept: new pages would cost more than small products
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tiles.size();) {
      const Tile& t = tiles[i];
      const int64_t stride = (t.columns + PANEL_N - 1) / PANEL_N * PANEL_N;
      if (t.streams) {
        StreamTile(p, t, &scratch.sums[0], stride);
      } else {
        PackTile(p, t, scratch, stride);
      }
      WithElement(p.d.element, [&](auto type) {
        using Out = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
        if constexpr (sizeof(Out) > 1) {
          StoreTile<Out>(p, t, &scratch.sums[0], stride, factor, p.bias == nullptr ? nullptr : &bias[t.column]);
        }
      });
    }
  });
  return 0;
}

}  // namespace gemm
}  // namespace flashinfer
