// SPDX-License-Identifier: Apache-2.0
// The SM90 kernels for four-bit weights on the CPU, called by test_emulated_w4.py.
#include <flashinfer/gemm/w4_sm90/kernel.cuh>

using namespace flashinfer;
using namespace flashinfer::gemm;

/// Compute a product of packed groups; `x` has the fields of the problem and of the configuration in the order below.
EMULATION_EXPORT int gemm_w4(int64_t type, int64_t tokens, int64_t weights, const int64_t* x) {
  W4Problem g;
  const auto next = [&] { return *x++; };
  const auto pointer = [&] { return reinterpret_cast<void*>(*x++); };
  g.a = pointer(), g.b = pointer(), g.d = pointer(), g.codes_scales = pointer();
  g.groups = static_cast<const int32_t*>(pointer()), g.grouping = Grouping::kPacked;
  g.m = next(), g.n = next(), g.k = next(), g.batch = g.weights = next();
  g.a_stride = g.k, g.out = Element(next());
  GatedActivation& activation = g.activation;
  activation.is_active = next() != 0;
  g.d_stride = activation.is_active ? g.n / 2 : g.n;
  const auto* const factors = static_cast<const float*>(pointer());
  (activation.is_active ? activation.factor : g.weight_factors) = factors;
  for (const float** values : {&activation.alpha, &activation.beta, &activation.limit}) {
    *values = static_cast<const float*>(pointer());
  }
  activation.bias = pointer();
  g.a_scale.data = static_cast<const float*>(pointer());
  GemmConfig c;
  c.swapped = true, c.cluster = int(next()), c.blocks = int(next());
  c.enable_pdl = c.weights_first = c.groups_first = next() != 0;
  emulation::device.clusters = std::max(1, c.blocks / c.cluster);
  constexpr WeightCode E2M1 = WeightCode::kE2M1, SHIFTED = WeightCode::kShiftedE2M1, INT4 = WeightCode::kInt4;
  switch (type * 1000000 + weights * 1000 + tokens) {
#define CASE(TYPE, WEIGHTS, TOKENS)                   \
  case int(TYPE) * 1000000 + WEIGHTS * 1000 + TOKENS: \
    return int(GemmW4Sm90<TYPE, TOKENS, WEIGHTS>(g, c, nullptr));
    CASE(E2M1, 128, 8)
    CASE(E2M1, 128, 16)
    CASE(E2M1, 128, 32)
    CASE(E2M1, 128, 64)
    CASE(E2M1, 128, 160)
    CASE(E2M1, 256, 16)
    CASE(E2M1, 256, 48)
    CASE(E2M1, 256, 128)
    CASE(SHIFTED, 128, 8)
    CASE(SHIFTED, 128, 16)
    CASE(SHIFTED, 128, 64)
    CASE(SHIFTED, 256, 32)
    CASE(SHIFTED, 256, 128)
    CASE(INT4, 128, 16)
    CASE(INT4, 128, 64)
    CASE(INT4, 256, 64)
#undef CASE
  }
  return -1;
}

/// Return (weights * 1000 + tokens) * 16 + cluster of the rule, or of a tile that was measured; -1: of the rule.
/// `tiles`: five numbers of each of `count` tiles.
EMULATION_EXPORT int choose_w4(const double* tiles, int64_t count, int64_t rows, int64_t groups, int64_t n, int64_t k,
                               int64_t is_gated, int64_t tile, int64_t cluster, int64_t is_e4m3) {
  GemmShape x{rows, n, k, groups, Grouping::kPacked};
  x.is_gated = is_gated != 0, x.element_bytes = is_e4m3 != 0 ? 1 : 2;
  W4Tile list[32];
  for (int i = 0; i < count; ++i, tiles += 5) {
    list[i] = {int(tiles[0]), int(tiles[1]), tiles[2], tiles[3], int(tiles[4])};
  }
  GemmConfig c = ChooseW4(x, list, int(count), 132);
  if (tile >= 0) UseW4Tile(x, list[tile], int(cluster), &c);
  return (c.block_n * 1000 + c.block_m) * 16 + c.cluster;
}
