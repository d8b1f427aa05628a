// SPDX-License-Identifier: Apache-2.0
// Heuristic that chooses tile, cluster size and tile order of a GEMM on SM90: a model of the kernel's time, evaluated
// for each tile that the module has a kernel for. Rates are those of an H200 (132 SMs). Only ratios of the rates
// matter.
#pragma once
#include <algorithm>
#include <cstdint>

#include "problem_sm90.h"

namespace flashinfer {
namespace gemm {

/// A tile that a module has a kernel for.
struct TileShape {
  bool swapped;
  int block_m, block_n;
};

/// Problem size that the choice depends on. `rows` counts tokens: all tokens of one batch entry or of all groups, or,
/// for kMasked, the expected tokens per group.
struct GemmShape {
  int64_t rows, n, k;
  int64_t batch = 1;
  Grouping grouping = Grouping::kBatched;
  int element_bytes = 2;
  bool is_block = false;
  bool needs_swapped = false;  // scales of single weight rows
};

namespace model {

constexpr double DRAM = 4400.0;          // bytes per ns
constexpr double L2_PER_SM = 64.0;       // bytes per ns
constexpr double LOAD_PER_SM = 50.0;     // bytes per ns that a block receives from memory at most
constexpr double SHARED_PER_SM = 215.0;  // bytes per ns that wgmma reads from shared memory
constexpr double FLOP_PER_SM = 6300.0;   // operations per ns with 16-bit operands; twice as many with 8-bit operands
constexpr double START = 2500.0;         // ns: launch, first loads, last stores
constexpr double TILE = 120.0;           // ns between two tiles of a block that overlap with nothing

/// Number of non-empty groups, and rows per group.
struct Groups {
  double count, rows;
};
inline Groups GroupsOf(const GemmShape& x) {
  if (x.grouping == Grouping::kBatched || x.grouping == Grouping::kMasked) return {double(x.batch), double(x.rows)};
  const double count = std::max<double>(1, double(std::min(x.batch, x.rows)));
  return {count, double(x.rows) / count};
}

inline double CeilOf(double x, double by) { return double(int64_t((x + by - 1) / by)); }

/// Return the least DRAM traffic in bytes: each input is read once and each output written once, for any tile.
inline double MemoryBytes(const GemmShape& x) {
  const Groups g = GroupsOf(x);
  return g.count * (double(x.element_bytes) * double(x.k) * (double(x.n) + g.rows) + 2.0 * g.rows * double(x.n));
}

/// Return the time of two activities that overlap incompletely: a fifth of the shorter one is not hidden.
inline double Overlap(double x, double y) { return std::max(x, y) + 0.2 * std::min(x, y); }

/// Estimate the nanoseconds with tokens on the M side. There are `sms` blocks; clusters of `cluster` blocks share the
/// loads of tokens, or of weights if `share_b`.
inline double Normal(const GemmShape& x, const TileShape& tile, int cluster, bool share_b, int sms) {
  const Groups g = GroupsOf(x);
  double m_tiles = CeilOf(g.rows, tile.block_m), n_tiles = CeilOf(double(x.n), tile.block_n);
  (share_b ? m_tiles : n_tiles) = CeilOf(share_b ? m_tiles : n_tiles, cluster);
  const double waves = CeilOf(g.count * m_tiles * n_tiles, sms / cluster);
  const double k_bytes = double(x.k) * x.element_bytes;
  const double flop = 2.0 * tile.block_m * tile.block_n * double(x.k) / (FLOP_PER_SM * 2 / x.element_bytes);
  const double a = share_b || cluster == 1 ? tile.block_m : tile.block_m / 2.0;
  const double b = !share_b || cluster == 1 ? tile.block_n : tile.block_n / 2.0;
  const double l2 = k_bytes * (a + b) / L2_PER_SM;
  const double waves_of_64 = tile.block_m / 64.0;
  const double width = x.is_block ? std::min(tile.block_n, 128) : tile.block_n;
  const double shared = k_bytes * waves_of_64 * (tile.block_n / width) * (64 + width) / SHARED_PER_SM;
  const double store = 2.0 * tile.block_m * tile.block_n / SHARED_PER_SM;
  const double work = waves * (std::max({flop, l2, shared}) + 0.5 * store + TILE);
  return Overlap(work, MemoryBytes(x) / DRAM) + START;
}

/// Return how many clusters of `split` blocks run at once, one block per SM; SMs of a cluster belong to one group of 16.
inline int ClustersOf(int split, int sms) { return split == 1 ? sms : std::max(1, sms / 16 * (16 / split)); }

/// Estimate the nanoseconds with weights on the M side, and `split` blocks that share the K of a tile.
inline double Swapped(const GemmShape& x, const TileShape& tile, int split, int sms) {
  const Groups g = GroupsOf(x);
  const double tiles = g.count * CeilOf(g.rows, tile.block_m) * CeilOf(double(x.n), tile.block_n);
  const double rounds = CeilOf(tiles, ClustersOf(split, sms));
  const double k_bytes = double(x.k) * x.element_bytes / split;
  const double load = k_bytes * (tile.block_m + tile.block_n) / LOAD_PER_SM;
  const double flop = 2.0 * tile.block_m * tile.block_n * double(x.k) / split / (FLOP_PER_SM * 2 / x.element_bytes);
  const double shared = k_bytes * 2 * (64 + tile.block_m) / SHARED_PER_SM;
  const double exchange = split > 1 ? 400.0 + 6.0 * tile.block_m : 0.0;
  const double work = rounds * (std::max({flop * (x.is_block ? 1.3 : 1.0), load, shared}) + TILE + exchange);
  return Overlap(work, MemoryBytes(x) / DRAM) + START;
}

}  // namespace model

/// Choose the number of tiles along M per band (8 or 16) that gives concurrent blocks the smaller L2 footprint.
inline int ChooseRaster(int block_m, int block_n, int sms) {
  const auto footprint = [&](int g) { return g * block_m + (sms + g - 1) / g * block_n; };
  return footprint(16) < footprint(8) ? 16 : 8;
}

/// Choose among `count` tiles for a device of `sms` SMs.
inline GemmConfig ChooseSm90(const GemmShape& x, const TileShape* tiles, int count, int sms) {
  GemmConfig best;
  double best_time = 1e30;
  const auto consider = [&](const TileShape& tile, int cluster, bool share_b, double time) {
    if (time >= best_time) return;
    best_time = time;
    best.swapped = tile.swapped, best.block_m = tile.block_m, best.block_n = tile.block_n;
    best.cluster = cluster, best.share_b = share_b;
  };
  for (int i = 0; i < count; ++i) {
    const TileShape& tile = tiles[i];
    if (tile.swapped) {
      const int64_t k_blocks = std::max<int64_t>(1, x.k * x.element_bytes / SLAB_K_BYTES);
      for (int split = 1; split <= std::min<int64_t>(tile.block_m > 64 ? 4 : 8, k_blocks); ++split) {
        consider(tile, split, false, model::Swapped(x, tile, split, sms));
      }
      continue;
    }
    if (x.needs_swapped) continue;
    if (x.grouping == Grouping::kContiguous && CONTIGUOUS_ALIGNMENT % tile.block_m != 0) continue;
    consider(tile, 1, false, model::Normal(x, tile, 1, false, sms));
    consider(tile, 2, false, model::Normal(x, tile, 2, false, sms));
    if (x.grouping == Grouping::kBatched) consider(tile, 2, true, model::Normal(x, tile, 2, true, sms));
  }
  best.blocks = sms;
  best.raster = ChooseRaster(best.block_m, best.block_n, sms);
  return best;
}

}  // namespace gemm
}  // namespace flashinfer
