// SPDX-License-Identifier: Apache-2.0
// A layer of experts on the CPU with the kernels for SM90, in the order of csrc/fused_moe.cu, and hidden values of a
// block-scaled layer; called by test_emulated_layer.py.
#include <flashinfer/moe/layer.cuh>
#include <flashinfer/moe/sort_permute.cuh>
#include <flashinfer/gemm/sm90/kernel.cuh>
#include <flashinfer/gemm/sm90/swap_ab_kernel.cuh>

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
  const float* const limit = floats();

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
  if (!SupportsOneLaunch(pairs, experts, a.rounding)) return -1;
  Status status = SortAndPermute(s, {input, element, hidden, sorted, a, false}, nullptr);
  if (status != cudaSuccess) return int(status);

  gemm::GemmProblem p;
  p.a = rows, p.b = fc1, p.d = operand2;
  p.m = pairs, p.n = 2 * inner, p.k = hidden, p.batch = p.weights = experts;
  p.a_stride = p.b_stride = hidden, p.d_stride = inner, p.b_batch_stride = p.n * p.k;
  p.grouping = gemm::Grouping::kPacked, p.groups = s.expert_offsets, p.out = element;
  p.tile_counter = s.counters;
  p.activation.is_active = true;
  p.activation.factor = factor1, p.activation.quantizer = quantizer, p.activation.limit = limit;
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

/// Compute hidden values of a block-scaled layer of one token per pair: by GEMM 1 alone, or, with `sums`, by GEMM 1
/// and the kernel of activations. `x` has the fields in the order below.
EMULATION_EXPORT int hidden_blocks(const int64_t* x) {
  const auto next = [&] { return *x++; };
  const auto pointer = [&] { return reinterpret_cast<void*>(*x++); };
  const auto floats = [&] { return static_cast<float*>(reinterpret_cast<void*>(*x++)); };
  const int64_t rows = next(), experts = next(), hidden = next(), inner = next();
  gemm::GemmProblem p;
  p.a = pointer(), p.b = pointer();
  p.m = rows, p.n = 2 * inner, p.k = hidden, p.batch = p.weights = experts;
  p.a_stride = p.b_stride = hidden, p.b_batch_stride = p.n * p.k;
  p.grouping = gemm::Grouping::kPacked;
  const auto ids = static_cast<const int32_t*>(pointer()), numbers = static_cast<const int32_t*>(pointer());
  p.groups = static_cast<const int32_t*>(pointer());
  p.a_scale = {floats(), 0, 1, rows, 1};
  p.b_scale = {floats(), p.n / 128 * (hidden / 128), hidden / 128, 1, 128};
  void *const bias = pointer(), *const sums = pointer(), *const codes = pointer();
  float *const scales = floats(), *const alpha = floats(), *const beta = floats(), *const limit = floats();
  gemm::GemmConfig c;
  c.blocks = 3, c.swapped = true;
  emulation::device.clusters = c.blocks;
  const auto multiply = [&] { return gemm::GemmSwappedSm90<float8_e4m3_t, gemm::Scaling::kBlock, 8>(p, c, nullptr); };
  if (sums == nullptr) {
    p.d = codes, p.d_stride = inner, p.out = Element::kE4M3;
    p.activation.is_active = true, p.activation.bias = bias;
    p.activation.alpha = alpha, p.activation.beta = beta, p.activation.limit = limit;
    p.activation.scales = scales, p.activation.scale_stride = rows;
    return int(multiply());
  }
  p.d = sums, p.d_stride = p.n, p.out = Element::kBFloat16;
  const Status status = multiply();
  if (status != cudaSuccess) return int(status);
  ActivateParams a{};
  a.sums = {sums, Element::kBFloat16, p.n};
  a.sums.bias = bias, a.sums.bias_element = Element::kBFloat16;
  a.activation.type = limit == nullptr ? ActivationType::kSwiglu : ActivationType::kSwigluBias;
  a.activation.alpha = alpha, a.activation.beta = beta, a.activation.limit = limit;
  a.pairs = {ids, p.groups, numbers, numbers, rows, 1, 0, int32_t(experts)};
  a.output.data = codes, a.output.element = Element::kE4M3, a.output.columns = inner;
  a.output.rounding = Rounding::kBlocks, a.output.scales = scales, a.output.scale_stride = rows;
  return int(Activate(a, nullptr));
}
