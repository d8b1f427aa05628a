// SPDX-License-Identifier: Apache-2.0
// Index arithmetic of the tile schedules, for host and device.
#pragma once
#include "../host_device.h"

namespace flashinfer {
namespace gemm {

FLASHINFER_HD constexpr int CeilDivide(int a, int b) { return (a + b - 1) / b; }

/// A tile of a grid of tiles.
struct TileIndex {
  int batch, m, n;
};

/// Tile number `t` of a batch of grids (m_tiles, n_tiles), in bands of `raster` tiles along M: within a band M runs first, so
/// that the blocks that work at the same time share rows of both operands in L2.
FLASHINFER_HD constexpr TileIndex RasterTile(int t, int m_tiles, int n_tiles, int raster) {
  const int per_batch = m_tiles * n_tiles;
  const int batch = t / per_batch;
  const int rest = t - batch * per_batch;
  const int band = rest / (raster * n_tiles);
  const int in_band = rest - band * raster * n_tiles;
  const int first = band * raster;
  const int height = m_tiles - first < raster ? m_tiles - first : raster;
  return {batch, first + in_band % height, in_band / height};
}

/// Units of K of all tiles in one line, cut into `blocks` ranges of nearly equal length. 64-bit: 10^5 tiles of 10^3 units by
/// 10^3 blocks.
FLASHINFER_HD constexpr int64_t RangeBegin(int64_t units, int blocks, int block) { return units * block / blocks; }

/// Block whose range contains `unit`.
FLASHINFER_HD constexpr int RangeOwner(int64_t units, int blocks, int64_t unit) {
  int block = int((unit * blocks) / units);  // too small by at most one
  while (block + 1 < blocks && RangeBegin(units, blocks, block + 1) <= unit) ++block;
  return block;
}

}  // namespace gemm
}  // namespace flashinfer
