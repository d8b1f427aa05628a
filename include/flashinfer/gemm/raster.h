// SPDX-License-Identifier: Apache-2.0
// Index arithmetic of the tile schedules, for host and device.
#pragma once
#include "../host_device.h"

namespace flashinfer {
namespace gemm {

FLASHINFER_HD constexpr int CeilDivide(int a, int b) { return (a + b - 1) / b; }

/// Rows of a band of tiles of one group at most. Simulated for 132 blocks, an L2 of 24 to 36 MB and layers of 4,096 and
/// 16,384 tokens (8 experts of 4096 x 14336): without bands, groups of 4,096 rows read their tokens 13 times more often.
constexpr int GROUP_BAND_ROWS = 2048;

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

/// Return the height of bands of at most `most` tiles, chosen so that the bands of a grid of `m_tiles` are about equal.
FLASHINFER_HD constexpr int BandHeight(int m_tiles, int most) { return CeilDivide(m_tiles, CeilDivide(m_tiles, most)); }

}  // namespace gemm
}  // namespace flashinfer
