// SPDX-License-Identifier: Apache-2.0
// Fused launch of a prefill list and a decode list: an SM holds a block of each, so that tensor-core work of one
// overlaps memory reads of the other. The lists belong to prefill and decode requests of one batch (POD), or both
// attend with the same queries to different keys (a cascade of two levels): then every item writes a partial state, and
// one merge adds those of both lists. Plain host header; the kernels are in kernel.cuh and kernel_sm90.cuh.
//   test  pytest tests/cascade tests/pod
#pragma once
#include "../common/backend_interface.h"
#include "../plan/planner.h"

namespace flashinfer {
namespace attention {

/// Location of the partial states of a query token: the first tile of its request in the merge items of each list, and
/// the token's first row counted from there.
struct alignas(16) TokenPlace {
  int32_t prefill_tile;  ///< negative: the token does not exist
  int32_t prefill_row, decode_tile, decode_row;
};

/// The two lists of a cascade, with the parameters that differ.
template <typename Params>
struct FusedLists {
  Params prefill_params, decode_params;
  WorkList prefill, decode;
  const TokenPlace* places;
  int32_t tokens;
};

/// Number of blocks of each list that the current device runs at once; 0 if an SM cannot hold two. TILE: tile of the
/// prefill list. With the tile of the Hopper kernel (kernel_sm90.cuh): decode blocks, if all SMs ran the decode list.
template <typename Params, int TILE>
int FusedBlocks();

/// Launch two independent lists. The caller launches the merges of the prefill list.
template <typename Params, int TILE>
Status LaunchFused(const Params& prefill_params, const WorkList& prefill, const Params& decode_params,
                   const WorkList& decode, bool enable_pdl, Stream stream);

/// Launch the lists of a FusedPlan and their merge.
template <typename Params, int TILE>
Status LaunchFusedCascade(const FusedLists<Params>& pair, bool enable_pdl, Stream stream);

/// Two plans, one after the other, and the locations of tokens.
struct FusedPlan {
  PlanOutput prefill, decode;
  List<TokenPlace> places;
  int64_t prefill_ints, prefill_floats, place_ints;  ///< offsets in the workspaces; the decode plan is at 0
  int64_t int_bytes, float_bytes;
};

constexpr int32_t FUSED_INFO_SIZE = 2 * PLAN_INFO_SIZE + 3;

/// Plan both lists. `prefill` and `decode` are inputs as for separate plans; `blocks` is the number of resident blocks
/// of each list.
inline void PlanFused(PlanInput prefill, PlanInput decode, int32_t blocks, FusedPlan& out) {
  prefill.decode_tile = 0;
  decode.prefill_tiles[0] = decode.prefill_tiles[1] = 0;
  prefill.prefill_blocks[0] = prefill.prefill_blocks[1] = decode.decode_blocks = blocks;
  prefill.all_partial = decode.all_partial = true;
  Planner(prefill, out.prefill).Run();
  Planner(decode, out.decode).Run();

  const int32_t group = prefill.num_qo_heads / prefill.num_kv_heads;
  out.places.Resize(prefill.cuda_graph ? prefill.max_rows : prefill.qo_indptr[prefill.batch_size]);
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
  place(prefill, int32_t(out.prefill.info.tile), &TokenPlace::prefill_tile, &TokenPlace::prefill_row);
  place(decode, decode.decode_tile, &TokenPlace::decode_tile, &TokenPlace::decode_row);

  out.prefill_ints = out.decode.info.int_bytes;
  out.place_ints = out.prefill_ints + out.prefill.info.int_bytes;
  out.int_bytes = out.place_ints + int64_t(out.places.Size() * sizeof(TokenPlace));
  out.prefill_floats = out.decode.info.float_bytes;
  out.float_bytes = out.prefill_floats + out.prefill.info.float_bytes;
}

/// Copy the plan to `buffer` of int_bytes bytes.
inline void WriteFused(const FusedPlan& plan, char* buffer) {
  Planner::Write(plan.decode, buffer);
  Planner::Write(plan.prefill, buffer + plan.prefill_ints);
  std::memcpy(buffer + plan.place_ints, plan.places.begin(), plan.places.Size() * sizeof(TokenPlace));
}

}  // namespace attention
}  // namespace flashinfer
