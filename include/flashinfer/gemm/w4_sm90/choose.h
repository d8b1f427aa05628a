// SPDX-License-Identifier: Apache-2.0
// Products of groups of tokens with four-bit weights on SM90: description, declarations and the choice of a tile. One
// module has the kernels of one type of codes.
#pragma once
#include <cmath>

#include "../sm90/choose.h"
#include "../w4_layout.h"

namespace flashinfer {
namespace gemm {

/// GemmProblem with kPacked groups; a: bf16, or e4m3 with a scale per row or none (TakesE4M3), b: codes in the order of
/// w4_layout.h, n and k multiples of 128. Sums that are activated have no scales of rows.
struct W4Problem : GemmProblem {
  const void* codes_scales = nullptr;  // folded, (weights, n / 64, k / 128, ...): moe scales of mixed_weights.py
};

/// Compute d = a b^T with tiles of up to TOKENS tokens by 128 or 256 weights (kernel.cuh).
template <WeightCode TYPE, int TOKENS, int WEIGHTS>
Status GemmW4Sm90(const W4Problem& problem, const GemmConfig& config, Stream stream);

constexpr int W4_WEIGHTS = SWAPPED_WEIGHTS, W4_WIDE_WEIGHTS = 2 * SWAPPED_WEIGHTS;

/// A tile: a row of the table in jit/gemm/core.py, which renders them.
struct W4Tile {
  int tokens, weights;           // at most so many tokens
  double k_block, k_block_e4m3;  // ns per 128 of K without those of W4Once(), on an H200: of bf16, of e4m3 tokens
  int most_blocks;               // limit of the blocks that split K
};

constexpr int W4_SPLIT_TOKENS = 64;  // kernels for more tokens or weights do not split K

// Tiles of up to this many bf16 tokens are computed by stream.cuh, whose products are too slow for more.
constexpr int W4_STREAM_TOKENS = 32;
constexpr int W4_STREAM_MAX_SPLIT = 4;  // blocks that split K of its tiles

namespace model {

/// Nanoseconds of 128 of K of a tile that is not bound by its products, for the choice of a split.
constexpr double W4_K_BLOCK = 260;

/// Return the nanoseconds that a tile takes once.
inline double W4Once(const W4Tile& tile, bool is_gated) {
  const bool is_wide = tile.weights == W4_WIDE_WEIGHTS;
  return is_gated ? 1100 + (is_wide ? 5 : 10) * tile.tokens : 450 + (is_wide ? 1 : 4) * tile.tokens;
}

/// Return the groups of a product: the rows of one are known, those of several are random.
inline Groups W4Groups(const GemmShape& x) {
  Groups g = GroupsOf(x);
  g.is_random = x.batch > 1;
  return g;
}

/// Return the mean number of tiles of `tokens` by `weights`.
inline double CountW4Tiles(const GemmShape& x, int tokens, int weights) {
  const Groups g = W4Groups(x);
  return g.count * TilesPerGroup(g, tokens) * CeilOf(double(x.n), weights);
}

/// Estimate the nanoseconds of a product on `sms` SMs. Weights are decoded once for each tile of tokens.
inline double W4Time(const GemmShape& x, const W4Tile& tile, int sms) {
  const double waves = Waves(W4Groups(x), CountW4Tiles(x, tile.tokens, tile.weights), sms);
  const double k_block = x.element_bytes == 1 ? tile.k_block_e4m3 : tile.k_block;
  return waves * (k_block * double(x.k / 128) + W4Once(tile, x.is_gated));
}

/// Return how many blocks should split K of a tile.
inline int W4Split(const GemmShape& x, const W4Tile& tile, int sms) {
  const double k_blocks = double(x.k / 128), tiles = CountW4Tiles(x, tile.tokens, tile.weights);
  int best_split = 1;
  double best = 1e30;
  for (int split = 1; split <= tile.most_blocks && split <= int(k_blocks); ++split) {
    const double exchange = Exchange(tile.tokens, split), sum = W4_K_BLOCK * CeilOf(k_blocks, split);
    const double time = CeilOf(tiles, ClustersOf(split, sms)) * (sum + 300 + exchange / 2) + exchange;
    if (time < best) best = time, best_split = split;
  }
  return best_split;
}

}  // namespace model

/// Choose among `count` tiles, and a cluster, for a device of `sms` SMs. Constants were fitted to times of every tile in eight layers of experts
/// (e4m3: five) with 16 to 16384 tokens on an H200 (tests/hopper/tune_w4.py).
inline GemmConfig ChooseW4(const GemmShape& x, const W4Tile* tiles, int count, int sms) {
  const W4Tile* chosen = tiles;
  double best = 1e30;
  for (int i = 0; i < count; ++i) {
    const double time = model::W4Time(x, tiles[i], sms);
    if (time < best) best = time, chosen = tiles + i;
  }
  GemmConfig c;
  c.swapped = true, c.blocks = sms, c.block_m = chosen->tokens, c.block_n = chosen->weights;
  c.cluster = model::W4Split(x, *chosen, sms);
  return c;
}

/// Take a tile that was measured instead of the one that the rule chose, if so many blocks can split K.
inline void UseW4Tile(const GemmShape& x, const W4Tile& tile, int cluster, GemmConfig* c) {
  if (cluster < 1 || cluster > std::min<int64_t>(tile.most_blocks, x.k / 128)) return;
  c->block_m = tile.tokens, c->block_n = tile.weights, c->cluster = cluster;
}

}  // namespace gemm
}  // namespace flashinfer
