// SPDX-License-Identifier: Apache-2.0
// The SM90 kernels for four-bit weights on the CPU, called by test_emulated_w4.py.
#include <flashinfer/gemm/w4_sm90.cuh>

using namespace flashinfer;
using namespace flashinfer::gemm;

/// Compute a product of packed groups; `x` has the fields of the problem and of the configuration in the order below.
EMULATION_EXPORT int gemm_w4(int64_t type, int64_t tokens, const int64_t* x) {
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
  GemmConfig c;
  c.swapped = true, c.cluster = int(next()), c.blocks = int(next());
  c.enable_pdl = c.weights_first = c.groups_first = next() != 0;
  emulation::device.clusters = std::max(1, c.blocks / c.cluster);
  constexpr WeightCode E2M1 = WeightCode::kE2M1, SHIFTED = WeightCode::kShiftedE2M1, INT4 = WeightCode::kInt4;
  switch (type * 1000 + tokens) {
    case 8:
      return int(GemmW4Sm90<E2M1, 8>(g, c, nullptr));
    case 16:
      return int(GemmW4Sm90<E2M1, 16>(g, c, nullptr));
    case 32:
      return int(GemmW4Sm90<E2M1, 32>(g, c, nullptr));
    case 64:
      return int(GemmW4Sm90<E2M1, 64>(g, c, nullptr));
    case 160:
      return int(GemmW4Sm90<E2M1, 160>(g, c, nullptr));
    case 1008:
      return int(GemmW4Sm90<SHIFTED, 8>(g, c, nullptr));
    case 2064:
      return int(GemmW4Sm90<INT4, 64>(g, c, nullptr));
    case 1016:
      return int(GemmW4Sm90<SHIFTED, 16>(g, c, nullptr));
    case 2016:
      return int(GemmW4Sm90<INT4, 16>(g, c, nullptr));
  }
  return -1;
}

/// Return tokens * 16 + cluster of the rule.
EMULATION_EXPORT int choose_w4(int64_t rows, int64_t groups, int64_t n, int64_t k) {
  const GemmConfig c = ChooseW4(rows, groups, n, k, 132);
  return c.block_m * 16 + c.cluster;
}
