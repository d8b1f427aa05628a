// SPDX-License-Identifier: Apache-2.0
// A layer of experts on the CPU with the kernels for SM90, in the order of csrc/fused_moe.cu; called by
// test_emulated_layer.py.
#include <flashinfer/fused_moe.cuh>
#include <flashinfer/fused_moe/sort_permute.cuh>
#include <flashinfer/gemm/gemm_sm90.cuh>
#include <flashinfer/gemm/swapped_sm90.cuh>

using namespace flashinfer;
using namespace flashinfer::fused_moe;

namespace {

Status Multiply(int64_t kernel, const gemm::GemmProblem& p, bool weights_first) {
  gemm::GemmConfig c;
  c.blocks = 3, c.swapped = kernel > 0;
  c.enable_pdl = c.weights_first = c.groups_first = weights_first;
  emulation::device.clusters = c.blocks;
  constexpr gemm::Scaling TENSOR = gemm::Scaling::kTensor;
  if (kernel == 0) return gemm::GemmSm90<bfloat16_t, TENSOR, 128, 128>(p, c, nullptr);
  if (kernel == 1) return gemm::GemmSwappedSm90<bfloat16_t, TENSOR, 16>(p, c, nullptr);
  return gemm::GemmSwappedSm90<float8_e4m3_t, TENSOR, 16>(p, c, nullptr);
}

}  // namespace

/// Compute a layer; kernel 0: 128 x 128 tiles of bf16, 1: 16 tokens of bf16, 2: 16 tokens of e4m3. `x` has the fields in
/// the order below.
EMULATION_EXPORT int layer(int64_t kernel, const int64_t* x) {
  const auto next = [&] { return *x++; };
  const auto pointer = [&] { return reinterpret_cast<void*>(*x++); };
  const auto floats = [&] { return static_cast<float*>(reinterpret_cast<void*>(*x++)); };
  const int64_t tokens = next(), top_k = next(), experts = next(), first = next(), hidden = next(), inner = next();
  void *const input = pointer(), *const ids = pointer(), *const fc1 = pointer(), *const fc2 = pointer();
  int32_t* const tables = static_cast<int32_t*>(pointer());
  void *const rows = pointer(), *const operand2 = pointer(), *const sums2 = pointer(), *const output = pointer();
  const float* const scales = floats();
  const auto element = Element(next()), out = Element(next());
  float *const factor1 = floats(), *const quantizer = floats(), *const factor2 = floats();
  void *const bias1 = pointer(), *const bias2 = pointer();

  const int64_t pairs = tokens * top_k;
  MoeSortParams s{};
  s.experts = static_cast<const int32_t*>(ids), s.pairs = s.max_rows = int32_t(pairs);
  s.first_expert = int32_t(first), s.num_experts = int32_t(experts), s.align = 1;
  s.pair_to_row = tables, s.row_to_pair = tables + pairs, s.expert_offsets = tables + 2 * pairs;
  s.counters = s.expert_offsets + experts + 1;
  const SortedPairs sorted{s.experts, s.expert_offsets, s.pair_to_row,  s.row_to_pair,
                           tokens,    int32_t(top_k),   s.first_expert, s.num_experts};
  Operand a{};
  a.data = rows, a.element = element, a.columns = hidden, a.rounding = Rounding::kElement;
  if (!TakesOneLaunch(pairs, experts, a.rounding)) return -1;
  Status status = SortAndPermute(s, {input, element, hidden, sorted, a, false}, nullptr);
  if (status != cudaSuccess) return int(status);

  gemm::GemmProblem p;
  p.a = rows, p.b = fc1, p.d = operand2;
  p.m = pairs, p.n = 2 * inner, p.k = hidden, p.batch = p.weights = experts;
  p.a_stride = p.b_stride = hidden, p.d_stride = inner, p.b_batch_stride = p.n * p.k;
  p.grouping = gemm::Grouping::kPacked, p.groups = s.expert_offsets, p.out = element;
  p.tile_counter = s.counters;
  p.activation.is_active = true;
  p.activation.factor = factor1, p.activation.quantizer = quantizer;
  p.activation.bias = bias1, p.activation.is_bias_half = out == Element::kFloat16;
  status = Multiply(kernel, p, false);
  if (status != cudaSuccess) return int(status);

  p.activation = {};
  p.a = operand2, p.b = fc2, p.d = sums2, p.n = hidden, p.k = inner, p.out = out;
  p.a_stride = p.b_stride = inner, p.d_stride = hidden, p.b_batch_stride = p.n * p.k;
  p.weight_factors = factor2, p.tile_counter = s.counters + 1;
  status = Multiply(kernel, p, true);
  if (status != cudaSuccess) return int(status);
  Sums sums{sums2, out, hidden};
  sums.bias = bias2, sums.bias_element = out;
  return int(Finalize({sums, sorted, scales, output, out, hidden, false}, nullptr));
}
