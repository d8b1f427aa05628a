// SPDX-License-Identifier: Apache-2.0
// How one request is cut when there is no plan: every tile into equal chunks of its keys, as many as fill the device.
#pragma once
#include <algorithm>

#include "plan_lists.h"

namespace flashinfer {
namespace attention {

/// `rows` rows for each of `heads` KV heads, in tiles of `tile` rows, over `kv_len` keys: a list of at most `blocks`
/// blocks, and of no more than `slots` if there are several to a tile, because each leaves a partial state then.
inline WorkList CutEvenly(int64_t rows, int64_t heads, int64_t kv_len, int64_t tile, int64_t blocks, int64_t slots) {
  constexpr int64_t SMALLEST_CHUNK = 4 * GRANULE;
  const int64_t tiles = DivideUp(rows, tile);
  int64_t chunks = std::min(blocks, slots) / (tiles * heads);
  chunks = std::max<int64_t>(std::min(chunks, DivideUp(kv_len, SMALLEST_CHUNK)), 1);
  const int64_t chunk_size = std::max<int64_t>(DivideUp(DivideUp(kv_len, chunks), GRANULE) * GRANULE, GRANULE);
  chunks = std::max<int64_t>(DivideUp(kv_len, chunk_size), 1);
  WorkList work{};
  work.blocks = int32_t(tiles * chunks * heads);
  work.merge_blocks = chunks > 1 ? int32_t(tiles * heads) : 0;
  work.uniform = {int32_t(tiles), int32_t(chunks), int32_t(chunk_size)};
  return work;
}

}  // namespace attention
}  // namespace flashinfer
