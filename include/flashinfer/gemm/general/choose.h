// SPDX-License-Identifier: Apache-2.0
// Choice of a kernel of the general GEMM: how operands can be loaded, whether sums are scaled by block, and the tile.
#pragma once
#include <algorithm>
#include <climits>

#include "work.cuh"

namespace flashinfer {
namespace gemm {

/// Ways to load the operands.
enum class Loads {
  kChunks,   // both in chunks of 16 bytes along K
  kColumns,  // a in chunks along K, b in chunks along N (16-bit elements)
  kAny,      // both in any way, through registers
};

/// Tile of results: tokens by weights.
enum class TileSize {
  kSmall,   // 16 x 32, four warps share K
  kNarrow,  // 64 x 32, two warps share K: more blocks than kMedium that stream weights, each with more in flight
  kMedium,  // 64 x 64
  kLarge,   // 128 x 128
};

constexpr int BlockM(TileSize size) { return size == TileSize::kSmall ? 16 : size == TileSize::kLarge ? 128 : 64; }
constexpr int BlockN(TileSize size) {
  return size == TileSize::kSmall || size == TileSize::kNarrow ? 32 : BlockM(size);
}

constexpr int64_t MAX_PLAN = INT_MAX / 2;  // sums of two do not overflow

struct KernelChoice {
  Loads loads;
  bool scaled;  // scales differ between rows or along K
  TileSize size;
};

constexpr int ElementBytes(Element x) {
  return x == Element::kFloat32 ? 4 : x == Element::kE4M3 || x == Element::kE5M2 ? 1 : 2;
}

/// True if there is a kernel. fp32 has no tensor cores, and only fp8 is fast with block scales.
constexpr bool HasKernel(int element_bytes, Loads loads, bool scaled, TileSize size) {
  if (element_bytes == 4) return loads == Loads::kAny && size == TileSize::kMedium;
  if (element_bytes == 2 && scaled) return loads == Loads::kAny && size == TileSize::kMedium;
  if (element_bytes == 1 && loads == Loads::kColumns) return false;
  return loads != Loads::kAny || size == TileSize::kMedium || size == TileSize::kSmall;
}

/// True if runs of `run` bytes along a dimension of `unit_stride` can be loaded or stored at once, at multiples of that.
inline bool HasRuns(int run, const Matrix& x, int64_t unit_stride, int64_t other_stride, int64_t others,
                    int64_t batch) {
  const int64_t width = run / ElementBytes(x.element);
  return unit_stride == 1 && reinterpret_cast<uintptr_t>(x.data) % run == 0 &&
         (others == 1 || other_stride % width == 0) && (batch == 1 || x.batch_stride % width == 0);
}

/// Return how an operand of (batch, rows, k) can be loaded. `whole_depth`: blocks of scales begin at chunks.
inline OperandLayout LayoutOf(const Matrix& x, int64_t batch, int64_t rows, int64_t k, bool whole_depth) {
  OperandLayout layout;
  layout.chunks = whole_depth && HasRuns(16, x, x.column_stride, x.row_stride, rows, batch);
  layout.by_rows = x.column_stride != 1 && x.row_stride == 1;
  layout.words = layout.by_rows && HasRuns(4, x, x.row_stride, x.column_stride, k, batch);
  return layout;
}

inline bool VariesByRowOrK(const Scale& x) {
  return x.data != nullptr && (x.row_stride != 0 || x.k_stride != 0 || x.batch_stride != 0);
}

/// Choose a tile. `blocks`: tiles that fill the device.
inline TileSize ChooseSize(const GemmArguments& x, int64_t blocks) {
  const bool has_counts = x.grouping == Grouping::kPacked || x.grouping == Grouping::kMasked;
  const int64_t groups = x.batch > 1 ? x.batch : 1;
  const int64_t rows = x.grouping == Grouping::kPacked ? (x.m + groups - 1) / groups : x.m;
  if (rows <= 32) return TileSize::kSmall;
  if (x.grouping == Grouping::kMasked || (has_counts && rows <= 64)) return TileSize::kMedium;  // few rows are likely
  const int64_t problems = x.grouping == Grouping::kContiguous ? 1 : groups;
  if (rows <= 64) return (x.n + 63) / 64 * problems < blocks ? TileSize::kNarrow : TileSize::kMedium;
  const int64_t tiles = (rows + 127) / 128 * ((x.n + 127) / 128) * problems;
  return x.n > 64 && tiles >= blocks ? TileSize::kLarge : TileSize::kMedium;
}

/// Complete a plan and choose its kernel. `multiprocessors`: of the device.
inline KernelChoice ChooseKernel(GemmPlan* p, const GemmArguments& x, int multiprocessors) {
  const int bytes = ElementBytes(x.a.element), step = ROW_BYTES / bytes, width = 16 / bytes;
  p->x = x;
  p->m = int(x.m), p->n = int(x.n), p->k = int(x.k), p->batch = int(x.batch);
  const bool scaled = VariesByRowOrK(x.a_scale) || VariesByRowOrK(x.b_scale);
  int64_t depth = std::max<int64_t>(x.k, 1);  // elements of K per scale, equal for all scales that vary along K
  if (scaled && x.a_scale.k_stride != 0) depth = std::min(depth, x.a_scale.depth);
  if (scaled && x.b_scale.k_stride != 0) depth = std::min(depth, x.b_scale.depth);
  p->depth = int(depth);
  p->k_steps = KSteps(p->k, p->depth, step);

  const bool one_token_batch = x.grouping == Grouping::kContiguous || x.grouping == Grouping::kPacked;
  const int64_t token_batch = one_token_batch ? 1 : x.batch;
  const bool whole_depth = depth % width == 0 || depth >= x.k;         // blocks begin at chunks
  const bool whole_k = x.k % width == 0 && whole_depth;                // no block ends inside of a chunk
  const int64_t matrices = x.weight_indices == nullptr ? x.batch : 2;  // an index can name any matrix
  p->a_layout = LayoutOf(x.a, token_batch, x.m, x.k, whole_depth);
  p->a_layout.words &= x.grouping != Grouping::kPacked;  // tiles begin at any row
  p->b_layout = LayoutOf(x.b, matrices, x.n, x.k, whole_depth);
  p->d_chunks = HasRuns(16, x.d, x.d.column_stride, x.d.row_stride, x.m, token_batch);
  p->d_by_rows = x.d.column_stride != 1 && x.d.row_stride == 1;
  const bool b_columns = HasRuns(16, x.b, x.b.row_stride, x.b.column_stride, x.k, matrices) && x.n % width == 0;

  KernelChoice c{Loads::kAny, scaled, ChooseSize(x, multiprocessors)};
  if (p->a_layout.chunks && whole_k) {
    c.loads = p->b_layout.chunks ? Loads::kChunks : b_columns ? Loads::kColumns : Loads::kAny;
  }
  if (!HasKernel(bytes, c.loads, scaled, TileSize::kMedium)) c.loads = Loads::kAny;
  if (!HasKernel(bytes, c.loads, scaled, c.size)) c.size = TileSize::kMedium;  // there is one for all kinds of loads
  p->m_tiles = CeilDivide(p->m, BlockM(c.size)), p->n_tiles = CeilDivide(p->n, BlockN(c.size));
  return c;
}

/// Return the most tiles that there can be.
inline int64_t MaxTiles(const GemmPlan& p) {
  const int64_t columns = p.n_tiles, rows = p.m_tiles;
  if (p.x.grouping == Grouping::kMasked) return columns * rows * p.batch;
  if (p.x.grouping == Grouping::kPacked) return columns * (rows + p.batch);
  return KnownTiles(p);
}

/// True if a plan can hold the sizes of the problem and the numbers of its tiles.
inline bool FitsPlan(const GemmArguments& x) { return std::max({x.m, x.n, x.k, x.batch}) <= MAX_PLAN; }
inline bool FitsPlan(const GemmPlan& p) { return MaxTiles(p) <= MAX_PLAN; }

}  // namespace gemm
}  // namespace flashinfer
