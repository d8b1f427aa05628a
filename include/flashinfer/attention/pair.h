// SPDX-License-Identifier: Apache-2.0
// A wide list and a narrow list in one launch: an SM holds a block of each, so that products of the one run while keys
// of the other are read. Either they are requests that prefill and requests that decode, or both attend with the same
// queries, to other keys each (a cascade of two levels): then every item writes a partial state, and one merge adds those
// of both lists. Plain host header; kernels are in pair.cuh.
//   test  pytest tests/cascade tests/pod
#pragma once
#include "entry.h"
#include "plan.h"

namespace flashinfer {
namespace attention {

/// Where the partial states of a query token are: the first tile of its request in the merge items of either list, and
/// the first of its rows, counted from there.
struct alignas(16) TokenPlace {
  int32_t wide_tile;  ///< negative: no such token
  int32_t wide_row, narrow_tile, narrow_row;
};

/// The two lists of a cascade, with what differs between their parameters.
template <typename Params>
struct Pair {
  Params wide_params, narrow_params;
  WorkList wide, narrow;
  const TokenPlace* places;
  int32_t tokens;
};

/// Blocks of either list that the current device runs at once; 0 if an SM cannot hold two. TILE: of the wide list.
template <typename Params, int TILE>
int PairBlocks();

/// Lists that have nothing to do with each other. Merges of the wide one are left to the caller.
template <typename Params, int TILE>
Status LaunchTogether(const Params& wide_params, const WorkList& wide, const Params& narrow_params,
                      const WorkList& narrow, bool enable_pdl, Stream stream);

/// Lists of a PairPlan, and their merge.
template <typename Params, int TILE>
Status LaunchPair(const Pair<Params>& pair, bool enable_pdl, Stream stream);

/// Two plans, one after the other, and the places of tokens.
struct PairPlan {
  PlanOutput wide, narrow;
  List<TokenPlace> places;
  int64_t wide_ints, wide_floats, place_ints;  ///< where they start in the workspaces; the narrow plan is at 0
  int64_t int_bytes, float_bytes;
};

constexpr int32_t PAIR_INFO_SIZE = 2 * PLAN_INFO_SIZE + 3;

/// `wide` and `narrow` as for plans of their own; `blocks` is what each list has resident.
inline void PlanPair(PlanInput wide, PlanInput narrow, int32_t blocks, PairPlan& out) {
  wide.narrow_tile = 0;
  narrow.wide_tiles[0] = narrow.wide_tiles[1] = 0;
  wide.wide_blocks[0] = wide.wide_blocks[1] = narrow.narrow_blocks = blocks;
  wide.all_partial = narrow.all_partial = true;
  Planner(wide, out.wide).Run();
  Planner(narrow, out.narrow).Run();

  const int32_t group = wide.num_qo_heads / wide.num_kv_heads;
  out.places.Resize(wide.cuda_graph ? wide.max_rows : wide.qo_indptr[wide.batch_size]);
  std::fill(out.places.begin(), out.places.end(), TokenPlace{-1, 0, 0, 0});
  auto place = [&](const PlanInput& in, int32_t tile_rows, int32_t TokenPlace::* tile, int32_t TokenPlace::* row) {
    int32_t first = 0;
    for (int32_t b = 0; b < in.batch_size; ++b) {
      const int32_t begin = in.qo_indptr[b], tokens = in.qo_indptr[b + 1] - begin;
      for (int32_t i = 0; i < tokens; ++i) {
        out.places[begin + i].*tile = first;
        out.places[begin + i].*row = i * group;
      }
      first += int32_t(DivideUp(int64_t(tokens) * group, tile_rows));
    }
  };
  place(wide, int32_t(out.wide.info.tile), &TokenPlace::wide_tile, &TokenPlace::wide_row);
  place(narrow, narrow.narrow_tile, &TokenPlace::narrow_tile, &TokenPlace::narrow_row);

  out.wide_ints = out.narrow.info.int_bytes;
  out.place_ints = out.wide_ints + out.wide.info.int_bytes;
  out.int_bytes = out.place_ints + int64_t(out.places.Size() * sizeof(TokenPlace));
  out.wide_floats = out.narrow.info.float_bytes;
  out.float_bytes = out.wide_floats + out.wide.info.float_bytes;
}

/// Copy the plan to `buffer`, which holds int_bytes.
inline void WritePair(const PairPlan& plan, char* buffer) {
  Planner::Write(plan.narrow, buffer);
  Planner::Write(plan.wide, buffer + plan.wide_ints);
  std::memcpy(buffer + plan.place_ints, plan.places.begin(), plan.places.Size() * sizeof(TokenPlace));
}

}  // namespace attention
}  // namespace flashinfer
