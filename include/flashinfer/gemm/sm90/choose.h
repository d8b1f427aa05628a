// SPDX-License-Identifier: Apache-2.0
// Heuristic that chooses tile, cluster size and tile order of a GEMM on SM90: a model of the kernel's time, evaluated
// for each tile that the module has a kernel for. Constants were fitted to times of every tile on an H200
// (tests/hopper/tune.py). Only ratios of the times matter.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "problem.h"

namespace flashinfer {
namespace gemm {

/// A tile that a module has a kernel for: a row of the table in jit/gemm/core.py, which renders them.
struct TileShape {
  bool swapped;
  int block_m, block_n;
  int most_blocks;  // limit of the blocks that split K of a swapped tile, or share an operand of another one
  bool splits_k;    // tokens on the M side: there is a kernel whose blocks split K (split_k.cuh)
  double k_block;   // ns per 128 bytes of K, on an H200; of a swapped tile, with 128 weights
  double once;      // ns of a tile with tokens on the M side beside those
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
  bool is_gated = false;
};

namespace model {

constexpr double DRAM = 4200.0;   // bytes per ns
constexpr double START = 7000.0;  // ns: launch, first loads, last stores

/// Times of a tile of 64 weights whose warpgroups share K, relative to one of 128 weights: a K block has half
/// of the weights, and as many tokens.
constexpr double ALTERNATE_K_BLOCK = 0.6;  // factor of the time of a K block
constexpr double ALTERNATE_SUM = 250;      // ns: the sum of both warpgroups, once per tile
constexpr double PLAIN_EXCHANGE = 2250;    // ns: the sum of the blocks that split K of a tile with tokens on the M side

/// Return the time that `split` blocks take to exchange the partial sums of a tile.
inline double Exchange(int tokens, int split) {
  if (split == 1) return 0;
  const double of_few = tokens <= 4 ? 400 : tokens <= 8 ? 480 : tokens <= 16 ? 670 : 820;
  const double of_two = tokens <= 32 ? of_few : tokens <= 64 ? 3000 : 12000;
  return of_two * (1 + 0.15 * (split - 2));
}

/// Number of groups, and rows per group. Only the mean is known of packed groups: their rows are taken for random, as those
/// of experts that tokens are routed to (a Poisson distribution).
struct Groups {
  double count, rows;
  bool is_random = false;
};
inline Groups GroupsOf(const GemmShape& x) {
  if (x.grouping == Grouping::kBatched || x.grouping == Grouping::kMasked) return {double(x.batch), double(x.rows)};
  if (x.grouping == Grouping::kPacked) return {double(x.batch), double(x.rows) / double(x.batch), true};
  const double count = std::max<double>(1, double(std::min(x.batch, x.rows)));
  return {count, double(x.rows) / count};
}

inline double CeilOf(double x, double by) { return double(int64_t((x + by - 1) / by)); }

/// Return the share of groups that have rows.
inline double ShareWithRows(const Groups& g) { return g.is_random ? 1 - std::exp(-g.rows) : 1; }

/// Return the mean number of tiles of `block_m` rows per group: the sum over i of the probability of more than i * block_m
/// rows, which is that of a normal distribution but for i = 0.
inline double TilesPerGroup(const Groups& g, int block_m) {
  if (!g.is_random) return CeilOf(g.rows, block_m);
  const double deviation = std::sqrt(g.rows);
  int i = std::max(0, int((g.rows - 4 * deviation) / block_m));  // groups have at least so many whole tiles
  double tiles = i + (i == 0 ? ShareWithRows(g) : 1), share = 1;
  while (share > 1e-3) {
    share = 0.5 * std::erfc((++i * double(block_m) + 0.5 - g.rows) / (std::sqrt(2.0) * deviation));
    tiles += share;
  }
  return tiles;
}

/// Return the tiles that a block computes one after the other, if `at_once` are computed at a time. Blocks take those of
/// random groups from a counter (tile_queue.cuh), and end about together.
inline double Waves(const Groups& g, double tiles, int at_once) {
  return g.is_random ? std::max(1.0, tiles / at_once) : CeilOf(tiles, at_once);
}

/// Return the least DRAM traffic in bytes: each input is read once and each output written once, for any tile.
inline double MemoryBytes(const GemmShape& x) {
  const Groups g = GroupsOf(x);
  const double weights = double(x.element_bytes) * double(x.k) * double(x.n) * ShareWithRows(g);
  return g.count * (weights + g.rows * (double(x.element_bytes) * double(x.k) + 2.0 * double(x.n)));
}

/// Return the time of two activities that overlap incompletely: a tenth of the shorter one is not hidden.
inline double Overlap(double x, double y) { return std::max(x, y) + 0.1 * std::min(x, y); }

inline double KBlocks(const GemmShape& x) { return CeilOf(double(x.k) * x.element_bytes, SLAB_K_BYTES); }

/// Estimate the nanoseconds with tokens on the M side, on `sms` blocks.
inline double Normal(const GemmShape& x, const TileShape& tile, int sms) {
  const Groups g = GroupsOf(x);
  const double tiles = g.count * TilesPerGroup(g, tile.block_m) * CeilOf(double(x.n), tile.block_n);
  const double work = Waves(g, tiles, sms) * (tile.k_block * KBlocks(x) + tile.once);
  return Overlap(work, MemoryBytes(x) / DRAM) + START;
}

/// Return true if the blocks of a cluster can split K of a tile with tokens on the M side (split_k.cuh).
inline bool CanSplitK(const GemmShape& x, const TileShape& tile) {
  return tile.splits_k && !x.is_gated && x.grouping == Grouping::kBatched;
}

/// Return how many clusters of `split` blocks run at once, one block per SM: the SMs of a cluster belong to one GPC of
/// about 18, and one GPC may have few.
inline int ClustersOf(int split, int sms) {
  if (split <= 2) return sms / split;
  const int most = sms / 18 * (18 / split);
  return std::max(1, split == 3 ? most * 9 / 10 : most);  // 40 clusters of three took as long as two waves on 132 SMs
}

/// Estimate the nanoseconds with tokens on the M side, and `split` blocks that share the K of a tile: one tile per cluster.
inline double NormalSplit(const GemmShape& x, const TileShape& tile, int split, int sms) {
  const Groups g = GroupsOf(x);
  const double tiles = g.count * CeilOf(g.rows, tile.block_m) * CeilOf(double(x.n), tile.block_n);
  if (tiles > ClustersOf(split, sms)) return 1e30;
  const double work = tile.k_block * CeilOf(KBlocks(x), split) + tile.once;
  return Overlap(work, MemoryBytes(x) / DRAM) + PLAIN_EXCHANGE + START;
}

/// Estimate the nanoseconds with weights on the M side, and `split` blocks that share the K of a tile.
inline double Swapped(const GemmShape& x, const TileShape& tile, int split, int sms) {
  const Groups g = GroupsOf(x);
  const bool has_halves = x.is_gated && x.is_block;  // a tile then has 128 up columns and 128 gate columns
  const double weights = has_halves ? 2 * tile.block_n : tile.block_n;
  const double tiles = g.count * TilesPerGroup(g, tile.block_m) * CeilOf(double(x.n), weights);
  // Half of an exchange overlaps with loads of the next tile; the last one overlaps with nothing.
  const bool alternates = tile.block_n == ALTERNATE_WEIGHTS;
  const double exchange = Exchange(alternates ? tile.block_m / 2 : tile.block_m, split);  // a thread has half of them
  const double factor = alternates ? ALTERNATE_K_BLOCK : has_halves ? 2.1 : 1;
  const double sum = tile.k_block * factor * CeilOf(KBlocks(x), split);
  const double of_token = g.is_random ? 22 : tile.block_m > 64 ? 20 : 12;  // stored from registers, some lines in parts
  const double stores = 250 + of_token * tile.block_m + (alternates ? ALTERNATE_SUM : 0);
  const double work = Waves(g, tiles, ClustersOf(split, sms)) * (sum + stores + exchange / 2);
  return Overlap(work, MemoryBytes(x) / DRAM) + exchange + START;
}

}  // namespace model

/// Choose the number of tiles along M per band (8 or 16) that gives concurrent blocks the smaller L2 footprint.
inline int ChooseRaster(int block_m, int block_n, int sms) {
  const auto footprint = [&](int g) { return g * block_m + (sms + g - 1) / g * block_n; };
  return footprint(16) < footprint(8) ? 16 : 8;
}

/// Return true if a tile can serve a product. Gated blocks of many rows, whose tokens may be gathered, are not served by
/// swapped tiles.
inline bool SupportsProduct(const GemmShape& x, const TileShape& tile) {
  if (x.is_gated && !CanGate(x.is_block, tile.swapped, tile.block_m, tile.block_n)) return false;
  if (tile.swapped) return !(x.is_gated && x.is_block) || model::GroupsOf(x).rows <= GATED_BLOCK_TOKENS;
  if (x.needs_swapped) return false;
  return x.grouping != Grouping::kContiguous || CONTIGUOUS_ALIGNMENT % tile.block_m == 0;
}

/// Return how many blocks may split K of a swapped tile.
inline int MostBlocks(const GemmShape& x, const TileShape& tile) {
  if (x.is_gated && x.is_block) return 1;
  return int(std::min<double>(tile.most_blocks, model::KBlocks(x)));
}

/// Return true if a product that quantises its tokens, with the tile and cluster `c`, takes no longer than a quantiser and a
/// product (fitted on an H200 to 8 sizes of weights). The warps that quantise a stage take longer than its weights, so blocks
/// must have few stages.
inline bool QuantizesFaster(const GemmShape& x, const GemmConfig& c) {
  const double clusters = model::ClustersOf(c.cluster, c.blocks);
  const double tiles = model::CeilOf(model::CeilOf(double(x.n), c.block_n), clusters);
  return tiles * model::CeilOf(model::KBlocks(x), c.cluster) <= (x.rows <= 4 ? 34 : 14);
}

/// Take a tile that was measured instead of the one that the rule chose, if it can serve the product; `cluster` blocks
/// split K of a swapped tile, and are 1 for others.
inline void UseTile(const GemmShape& x, const TileShape& tile, int cluster, GemmConfig* c) {
  if (cluster < 1 || cluster > (tile.swapped ? MostBlocks(x, tile) : 1) || !SupportsProduct(x, tile)) return;
  c->swapped = tile.swapped, c->block_m = tile.block_m, c->block_n = tile.block_n, c->cluster = cluster;
  c->share_b = c->split_k = false;
  c->raster = ChooseRaster(c->block_m, c->block_n, c->blocks);
}

/// Choose among `count` tiles for a device of `sms` SMs.
inline GemmConfig ChooseSm90(const GemmShape& x, const TileShape* tiles, int count, int sms) {
  GemmConfig best;
  double best_time = 1e30;
  const auto consider = [&](const TileShape& tile, int cluster, double time) {
    if (time >= best_time) return;
    best_time = time;
    best.swapped = tile.swapped, best.block_m = tile.block_m, best.block_n = tile.block_n, best.cluster = cluster;
    best.split_k = !tile.swapped && cluster > 1;
  };
  for (int i = 0; i < count; ++i) {
    const TileShape& tile = tiles[i];
    if (!SupportsProduct(x, tile)) continue;
    if (tile.swapped) {
      const int most = MostBlocks(x, tile);
      for (int split = 1; split <= most; ++split) consider(tile, split, model::Swapped(x, tile, split, sms));
      continue;
    }
    // Pairs of blocks that share loads were slower than single blocks by 0 to 4 %, except at 1 % of the shapes.
    consider(tile, 1, model::Normal(x, tile, sms));
    if (!model::CanSplitK(x, tile)) continue;
    for (int split = 2; split <= std::min<double>(PLAIN_MAX_SPLIT, model::KBlocks(x)); split *= 2) {
      consider(tile, split, model::NormalSplit(x, tile, split, sms));
    }
  }
  best.blocks = sms;
  best.raster = ChooseRaster(best.block_m, best.block_n, sms);
  return best;
}

/// Return in words why the rule chose a configuration.
inline const char* ReasonOf(const GemmShape& x, const GemmConfig& c) {
  if (c.swapped && x.needs_swapped) return "scales of single rows of weights";
  if (c.swapped) return c.cluster > 1 ? "few rows, and few tiles: blocks split K" : "few rows are not padded to 64";
  return c.split_k ? "few tiles of long sums: blocks split K" : "the waves of tiles end earliest";
}

// ---------------- choices that a thread has made before: the model of all tiles takes 0.5 us, a look-up 0.02

inline bool IsSameShape(const GemmShape& x, const GemmShape& y) {
  return x.rows == y.rows && x.n == y.n && x.k == y.k && x.batch == y.batch && x.grouping == y.grouping &&
         x.element_bytes == y.element_bytes && x.is_block == y.is_block && x.needs_swapped == y.needs_swapped &&
         x.is_gated == y.is_gated;
}

/// Return choose(), which depends on `x` and `sms` alone in all calls of a module with this type of `choose`.
template <typename Choose>
GemmConfig FindChoice(const GemmShape& x, int sms, const Choose& choose) {
  struct Entry {
    GemmShape shape;
    int sms;  // 0: not in use
    GemmConfig choice;
  };
  constexpr uint64_t ENTRIES = 128;
  static thread_local Entry entries[ENTRIES];
  uint64_t hash = uint64_t(x.rows);
  for (const int64_t size : {x.n, x.k, x.batch}) hash = hash * 31 + uint64_t(size);
  Entry& entry = entries[(hash * 0x9E3779B97F4A7C15u) >> 57];
  if (entry.sms != sms || !IsSameShape(entry.shape, x)) {
    entry.choice = choose();
    entry.shape = x, entry.sms = sms;
  }
  return entry.choice;
}

}  // namespace gemm
}  // namespace flashinfer
