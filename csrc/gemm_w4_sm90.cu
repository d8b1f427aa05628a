// SPDX-License-Identifier: Apache-2.0
// Launcher of the SM90 kernels for four-bit weights: the choice of a tile, stream. Callers have checked the operands. One
// module has the kernels of one type of codes, listed in gemm_w4_sm90_config.inc.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/gemm/sm90/choose.h>
#include <flashinfer/device/sm_count.h>
#include <flashinfer/gemm/w4_sm90/choose.h>
#include "gemm_w4_sm90_config.inc"
// clang-format on

using namespace flashinfer::gemm;

namespace {

constexpr char OP[] = "gemm_w4_sm90";
constexpr int TILE_COUNT = sizeof(W4_TILES) / sizeof(W4_TILES[0]);

int IndexOf(const GemmConfig& c) {
  int i = 0;
  while (i < TILE_COUNT - 1 && !(W4_TILES[i].tokens == c.block_m && W4_TILES[i].weights == c.block_n)) ++i;
  return i;
}

/// Return the rule's choice for the product of experts `x`.
GemmConfig ChooseByRule(const GemmShape& x, int sms) {
  return FindChoice(x, sms, [&] { return ChooseW4(x, W4_TILES, TILE_COUNT, sms); });
}

GemmShape ShapeOf(const W4Problem& p) {
  GemmShape x{p.ExpectedRows(), p.n, p.k, p.batch, Grouping::kPacked};
  x.is_gated = p.activation.is_active;
  x.element_bytes = TakesE4M3(CODE) ? 1 : 2;
  return x;
}

void Enqueue(const W4Problem& p, GemmConfig c, DLDevice device, bool enable_pdl, bool weights_first) {
  c.enable_pdl = enable_pdl;
  c.weights_first = c.groups_first = weights_first;
  CheckStatus(OP, ENTRIES[IndexOf(c)](p, c, get_stream(device)));
}

}  // namespace

/// Return the product of experts with four-bit weights for fused_moe.cu, with the tile and cluster of each GEMM of a layer.
/// The rule chooses for a tile of -1, and where so many blocks cannot split K. The function takes the address of a
/// flashinfer::gemm::W4Problem and runs on the current device; `weights_first`: the kernel before this one wrote neither
/// weights nor `groups`.
tvm::ffi::Function gemm_w4_sm90_experts(int64_t tile1, int64_t cluster1, int64_t tile2, int64_t cluster2) {
  for (int64_t tile : {tile1, tile2}) {
    if (tile >= TILE_COUNT) {
      FLASHINFER_THROW(ArgumentError) << OP << ": tile must be at most " << TILE_COUNT - 1 << ", got " << tile;
    }
  }
  const auto multiply = [=](void* problem, int64_t device_id, bool enable_pdl, bool weights_first) {
    const W4Problem& p = *static_cast<const W4Problem*>(problem);
    const DLDevice device{kDLCUDA, int32_t(device_id)};
    // GEMM 2 alone reads weights before the kernel before it ends.
    const int64_t tile = weights_first ? tile2 : tile1;
    const GemmShape shape = ShapeOf(p);
    GemmConfig c = ChooseByRule(shape, flashinfer::device::SmCount(device.device_id));
    if (tile >= 0) UseW4Tile(shape, W4_TILES[tile], int(weights_first ? cluster2 : cluster1), &c);
    Enqueue(p, c, device, enable_pdl, weights_first);
  };
  return tvm::ffi::Function::FromTyped(multiply);
}
