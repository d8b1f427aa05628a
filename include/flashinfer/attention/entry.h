// SPDX-License-Identifier: Apache-2.0
// What launchers call and a backend defines: attention/cpu.h, or attention/{narrow,wide,merge}.cuh in kernel units.
//
// `Params` is the generated struct of the module (csrc/attention_config.jinja): an AttentionParams or MlaParams with the
// variant's parameters and
//   static constexpr int HEAD_DIM_QK, HEAD_DIM_VO;          columns of q and k (k_pe included), of v and o
//   static constexpr PosEncodingMode POS_ENCODING;          kRoPELlama: the kernel rotates q and k, with rope_rcp_scale
//                                                           and rope_rcp_theta among the parameters
// The variant is `Variant<use_custom_mask>`, an alias template of the module in namespace flashinfer.
#pragma once
#include "params.h"

namespace flashinfer {
namespace attention {

/// Rows of the tiles that kernels exist for. Narrow tiles stream keys through each warp; wide ones share them.
constexpr int NARROW_TILE = 16;
constexpr int WIDE_TILE = 64;
constexpr int WIDEST_TILE = 128;
/// Whether the register file holds the output of a WIDEST_TILE.
constexpr bool HasWidestTile(int head_dim_vo) { return head_dim_vo <= 256; }

/// Tiles of the narrow kernel: those whose output fits into a warp's registers. It merges what was split by itself.
template <typename Params, int TILE>
inline constexpr bool SERVED_BY_NARROW = TILE == NARROW_TILE && Params::HEAD_DIM_VO <= 256 && !Params::SHARED_KV;

/// Blocks that the current device runs at once with tiles of TILE rows.
template <typename Params, int TILE>
int ResidentBlocks();

/// Run the items of `work`. PAGED: k and v are pages found through kv_indices, else rows. ALL_MASKED: the variant's mask
/// is asked for each pair (custom masks, multi-item scoring, masks of users' variants), otherwise only near the edges of
/// what bounds, diagonal and window leave visible.
template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
Status LaunchAttention(const Params& params, const WorkList& work, bool enable_pdl, Stream stream);

/// Merge what `work` was split into. `use_softmax` as in the variant: weighted by scores, or summed.
template <typename Params, int TILE>
Status LaunchMerge(const Params& params, const WorkList& work, bool enable_pdl, Stream stream);

}  // namespace attention
}  // namespace flashinfer
