// SPDX-License-Identifier: Apache-2.0
// Index arithmetic of the tile schedules, for host and device.
#pragma once
#include "../host_device.h"

namespace flashinfer {
namespace gemm {

FLASHINFER_HD constexpr int CeilDivide(int a, int b) { return (a + b - 1) / b; }

/// Position of a tile in a batch of tile grids.
struct TileIndex {
  int batch, m, n;
};

/// Return tile number `t` of a batch of grids (m_tiles, n_tiles), in bands of `raster` tiles along M. Within a band, M
/// varies fastest, so that concurrent blocks share rows of both operands in L2.
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

/// Return the first unit of a block's range. The K units of all tiles, concatenated, are split into `blocks` ranges of
/// nearly equal length. 64-bit, because 10^5 tiles of 10^3 units times 10^3 blocks overflow 32 bits.
FLASHINFER_HD constexpr int64_t RangeBegin(int64_t units, int blocks, int block) { return units * block / blocks; }

/// Return the block whose range contains `unit`.
FLASHINFER_HD constexpr int RangeOwner(int64_t units, int blocks, int64_t unit) {
  int block = int((unit * blocks) / units);  // too small by at most one
  while (block + 1 < blocks && RangeBegin(units, blocks, block + 1) <= unit) ++block;
  return block;
}

}  // namespace gemm
}  // namespace flashinfer
