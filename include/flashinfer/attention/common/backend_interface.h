// SPDX-License-Identifier: Apache-2.0
// Functions that launchers call and each backend defines: attention/cpu/launch.h, or attention/{launch,merge}.cuh in
// kernel units.
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

/// Rows of the tiles that kernels exist for. The decode kernel streams keys through each warp; the prefill kernel
/// shares them between warps.
constexpr int DECODE_TILE = 16;
constexpr int PREFILL_TILE = 64;
constexpr int LARGE_PREFILL_TILE = 128;
/// Return true if the register file holds the output of a LARGE_PREFILL_TILE.
constexpr bool HasLargePrefillTile(int head_dim_vo) { return head_dim_vo <= 256; }

/// True for tiles of the decode kernel: their output fits into the registers of a warp. That kernel merges split tiles
/// itself.
template <typename Params, int TILE>
inline constexpr bool SERVED_BY_DECODE_KERNEL = TILE == DECODE_TILE && Params::HEAD_DIM_VO <= 256 && !Params::SHARED_KV;

/// Number of blocks with tiles of TILE rows that the current device runs at once.
template <typename Params, int TILE>
int MaxActiveBlocks();

/// Run the items of `work`. PAGED: k and v are pages found through kv_indices, otherwise rows. ALL_MASKED: evaluate the
/// variant's mask for every pair (custom masks, multi-item scoring, masks of user variants), otherwise only near the
/// edges of the range that bounds, diagonal and window leave visible.
template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
Status LaunchAttention(const Params& params, const WorkList& work, bool enable_pdl, Stream stream);

/// Merge the partial states of `work`. `use_softmax` as in the variant: weighted by log-sum-exp, or summed.
template <typename Params, int TILE>
Status LaunchMerge(const Params& params, const WorkList& work, bool enable_pdl, Stream stream);

}  // namespace attention
}  // namespace flashinfer
