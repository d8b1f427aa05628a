// SPDX-License-Identifier: Apache-2.0
// Launcher of the SM90 kernels for four-bit weights: the choice of a tile, stream. Callers have checked the operands. One
// module has the kernels of one type of codes, listed in gemm_w4_sm90_config.inc.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/gemm/choose_cache_sm90.h>
#include <flashinfer/gemm/sm_count.h>
#include <flashinfer/gemm/w4_sm90.h>
#include "gemm_w4_sm90_config.inc"
// clang-format on

using namespace flashinfer::gemm;

namespace {

constexpr int TILE_COUNT = sizeof(W4_TILES) / sizeof(W4_TILES[0]);
static_assert(TILE_COUNT == sizeof(ENTRIES) / sizeof(ENTRIES[0]), "tiles of jit/gemm.py and of w4_sm90.h");

int IndexOf(const GemmConfig& c) {
  int i = 0;
  while (i < TILE_COUNT - 1 && !(W4_TILES[i].tokens == c.block_m && W4_TILES[i].weights == c.block_n)) ++i;
  return i;
}

}  // namespace

/// Multiply the rows of experts with four-bit weights for fused_moe.cu, on the current device. `problem`: a
/// flashinfer::gemm::W4Problem; `weights_first`: the kernel before this one wrote neither weights nor `groups`.
void gemm_w4_sm90_experts(void* problem, int64_t device_id, bool enable_pdl, bool weights_first) {
  const W4Problem& p = *static_cast<const W4Problem*>(problem);
  const DLDevice device{kDLCUDA, int32_t(device_id)};
  const int sms = SmCount(device.device_id);
  GemmShape shape{p.m, p.n, p.k, p.batch, Grouping::kPacked};
  shape.is_gated = p.activation.is_active;
  GemmConfig c = FindChoice(shape, sms, [&] { return ChooseW4(shape, sms); });
  c.enable_pdl = enable_pdl;
  c.weights_first = c.groups_first = weights_first;
  CheckStatus("gemm_w4_sm90", ENTRIES[IndexOf(c)](p, c, get_stream(device)));
}
