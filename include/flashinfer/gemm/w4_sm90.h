// SPDX-License-Identifier: Apache-2.0
// Products of groups of tokens with four-bit weights on SM90: description, declarations and the choice of a tile. One
// module has the kernels of one type of codes.
#pragma once
#include <cmath>

#include "choose_sm90.h"
#include "w4_layout.h"

namespace flashinfer {
namespace gemm {

/// GemmProblem with kPacked groups; a: bf16, b: codes in the order of w4_layout.h, n and k multiples of 128.
struct W4Problem : GemmProblem {
  const void* codes_scales = nullptr;  // folded, (weights, n / 64, k / 128, ...): moe scales of mixed_weights.py
};

/// Compute d = a b^T with tiles of up to TOKENS tokens by 128 weights (w4_sm90.cuh).
template <WeightCode TYPE, int TOKENS>
Status GemmW4Sm90(const W4Problem& problem, const GemmConfig& config, Stream stream);

constexpr int W4_TOKENS[] = {8, 16, 32, 64, 96, 128, 160, 192, 256};  // tokens of each tile of a module
constexpr int W4_SPLIT_TOKENS = 64;                                   // tiles with more tokens do not split K

// Tiles of up to this many tokens are computed by w4_stream_sm90.cuh, whose products are too slow for more.
#ifndef FLASHINFER_W4_STREAM_TOKENS
#define FLASHINFER_W4_STREAM_TOKENS 32
#endif
// Its warps per 64 rows of weights and blocks per SM, of tiles of 8 and of 16 tokens.
#ifndef FLASHINFER_W4_STREAM_PARTS
#define FLASHINFER_W4_STREAM_PARTS 4
#endif
#ifndef FLASHINFER_W4_STREAM_PARTS_16
#define FLASHINFER_W4_STREAM_PARTS_16 4
#endif
#ifndef FLASHINFER_W4_STREAM_BLOCKS
#define FLASHINFER_W4_STREAM_BLOCKS 2
#endif
#ifndef FLASHINFER_W4_STREAM_BLOCKS_16
#define FLASHINFER_W4_STREAM_BLOCKS_16 2
#endif
// Tokens per load of its tiles of 8: 4 load less where groups have few, with conflicts of banks.
#ifndef FLASHINFER_W4_STREAM_BOX
#define FLASHINFER_W4_STREAM_BOX 8
#endif
// Its warps that load, in turn. One took 1,620 clocks for the 6 loads of a stage that stages had once (H200).
#ifndef FLASHINFER_W4_PRODUCERS
#define FLASHINFER_W4_PRODUCERS 2
#endif
// Most stages of its ring.
#ifndef FLASHINFER_W4_STREAM_STAGES
#define FLASHINFER_W4_STREAM_STAGES 24
#endif
// Mean of tokens per group up to which groups of more than 32 tokens are several of its tiles, decoded each time.
#ifndef FLASHINFER_W4_STREAM_MEAN
#define FLASHINFER_W4_STREAM_MEAN 0
#endif
constexpr int W4_STREAM_TOKENS = FLASHINFER_W4_STREAM_TOKENS;
constexpr int W4_STREAM_MAX_SPLIT = 4;  // blocks that split K of its tiles

namespace model {

/// Return the nanoseconds of 128 of K of a tile that is not bound by its products.
constexpr double W4_K_BLOCK = 260;

}  // namespace model

/// Choose tile and cluster for `rows` tokens of all groups on a device of `sms` SMs. Weights are decoded once for each
/// tile of tokens, so the tile takes all rows of most groups: the mean plus 1.5 deviations of random routing.
inline GemmConfig ChooseW4(int64_t rows, int64_t groups, int64_t n, int64_t k, int sms) {
  GemmConfig c;
  c.swapped = true, c.block_n = 128, c.blocks = sms;
  const double mean = double(rows) / double(std::max<int64_t>(1, groups)), most = mean + 1.5 * std::sqrt(mean);
  c.block_m = 256;
  for (int tokens : W4_TOKENS) {
    if (double(tokens) < std::min(most, double(rows)) || tokens > c.block_m) continue;
    c.block_m = tokens;
    break;
  }
  if (mean <= FLASHINFER_W4_STREAM_MEAN) c.block_m = std::min(c.block_m, W4_STREAM_TOKENS);
  if (c.block_m > W4_SPLIT_TOKENS) return c;
  const double k_blocks = double(k / 128), used = double(std::min(groups, rows)), tiles = used * double(n / 128);
  double best = 1e30;
  const int most_split = c.block_m <= W4_STREAM_TOKENS ? W4_STREAM_MAX_SPLIT : 8;
  for (int split = 1; split <= most_split && split <= int(k_blocks); ++split) {
    const double exchange = model::Exchange(c.block_m, split);
    const double sum = model::W4_K_BLOCK * model::CeilOf(k_blocks, split);
    const double time = model::CeilOf(tiles, model::ClustersOf(split, sms)) * (sum + 300 + exchange / 2) + exchange;
    if (time < best) best = time, c.cluster = split;
  }
  return c;
}

}  // namespace gemm
}  // namespace flashinfer
