// SPDX-License-Identifier: Apache-2.0
// Schedules and the choice of tiles, called by test_schedule.py through ctypes.
#define FLASHINFER_CPU
#include <flashinfer/gemm/sm90/choose.h>
#include <flashinfer/gemm/raster.h>

using namespace flashinfer::gemm;

extern "C" {

void raster_tiles(int count, int m_tiles, int n_tiles, int raster, int* out) {
  for (int t = 0; t < count; ++t) {
    const TileIndex x = RasterTile(t, m_tiles, n_tiles, raster);
    out[3 * t] = x.batch, out[3 * t + 1] = x.m, out[3 * t + 2] = x.n;
  }
}

/// Chosen tile as (swapped, block_m, block_n, cluster, what it shares, raster); `tiles` has seven numbers of each.
void choose(const int64_t* shape, bool is_block, bool needs_swapped, bool is_gated, const double* tiles, int count,
            int sms, int* out) {
  GemmShape x{shape[0], shape[1], shape[2]};
  x.batch = shape[3], x.grouping = Grouping(shape[4]), x.element_bytes = int(shape[5]);
  x.is_block = is_block, x.needs_swapped = needs_swapped, x.is_gated = is_gated;
  TileShape list[32];
  for (int i = 0; i < count; ++i, tiles += 7) {
    list[i] = {tiles[0] != 0, int(tiles[1]), int(tiles[2]), int(tiles[3]), tiles[4] != 0, tiles[5], tiles[6]};
  }
  const GemmConfig c = ChooseSm90(x, list, count, sms);
  out[0] = c.swapped, out[1] = c.block_m, out[2] = c.block_n, out[3] = c.cluster, out[4] = c.split_k ? 2 : c.share_b,
  out[5] = c.raster;
}
}
