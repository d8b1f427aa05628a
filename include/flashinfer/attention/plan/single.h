// SPDX-License-Identifier: Apache-2.0
// Plan of a single request: every tile is split into equal chunks of its keys, as many as fill the device.
#pragma once
#include <algorithm>

#include "types.h"

namespace flashinfer {
namespace attention {

/// Split `rows` rows of each of `heads` KV heads, in tiles of `tile` rows, over `kv_len` keys into at most `blocks`
/// blocks, and at most `slots` blocks if a tile is split, because each block then writes a partial state.
inline WorkList PlanSingle(int64_t rows, int64_t heads, int64_t kv_len, int64_t tile, int64_t blocks, int64_t slots) {
  constexpr int64_t SMALLEST_CHUNK = 4 * KV_UNIT;
  const int64_t tiles = DivideUp(rows, tile);
  int64_t chunks = std::min(blocks, slots) / (tiles * heads);
  chunks = std::max<int64_t>(std::min(chunks, DivideUp(kv_len, SMALLEST_CHUNK)), 1);
  const int64_t chunk_size = std::max<int64_t>(DivideUp(DivideUp(kv_len, chunks), KV_UNIT) * KV_UNIT, KV_UNIT);
  chunks = std::max<int64_t>(DivideUp(kv_len, chunk_size), 1);
  WorkList work{};
  work.blocks = int32_t(tiles * chunks * heads);
  work.merge_blocks = chunks > 1 ? int32_t(tiles * heads) : 0;
  work.single_request = {int32_t(tiles), int32_t(chunks), int32_t(chunk_size)};
  return work;
}

}  // namespace attention
}  // namespace flashinfer
