// SPDX-License-Identifier: Apache-2.0
// Rows of the tiles of the Hopper prefill kernel (kernel.cuh). Host header: the planner needs them.
#pragma once

namespace flashinfer {
namespace attention {

/// Rows of a tile: 64 for each consumer warpgroup. Three warpgroups have registers for 64 output columns only; such
/// heads are bound by exponentials, which a third warpgroup hides better.
constexpr int PrefillTileSm90(int head_dim_qk, int head_dim_vo) {
  return head_dim_qk <= 64 && head_dim_vo <= 64 ? 192 : 128;
}

/// Rows of a tile of the form for short items (Form::kShort of shape.cuh): one consumer warpgroup.
constexpr int SHORT_PREFILL_TILE = 64;

/// True for head dimensions that the form for short items exists for: two of its blocks fit into an SM.
constexpr bool HasShortPrefillSm90(int head_dim_qk, int head_dim_vo) {
  return head_dim_qk <= 128 && head_dim_vo <= 128;
}

/// True for head dimensions that the kernel exists for: wgmma has these widths of results, and two stages of 64 keys
/// fit into shared memory.
constexpr bool HasPrefillSm90(int head_dim_qk, int head_dim_vo) {
  return head_dim_qk % 16 == 0 && head_dim_qk <= 256 &&
         (head_dim_vo == 64 || head_dim_vo == 96 || head_dim_vo == 128 || head_dim_vo == 192 || head_dim_vo == 256);
}

}  // namespace attention
}  // namespace flashinfer
