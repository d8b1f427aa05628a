// SPDX-License-Identifier: Apache-2.0
// The first stages of a mixture of experts on the CPU, called by test_emulated_stages.py.
#include <flashinfer/moe/layer.cuh>
#include <flashinfer/moe/sort_permute.cuh>

using namespace flashinfer;
using namespace flashinfer::fused_moe;

/// Sort pairs and permute tokens, in one launch (1), in two or three (2), or in two with a cluster (3), or sort pairs and
/// quantise each token once (4), or permute with a scale per row (5); `x` has the fields in the order below. With scales,
/// results are e4m3 numbers: bf16 ones without a factor, codes with scales of blocks or rows.
EMULATION_EXPORT int sort_and_permute(int64_t launches, const int64_t* x) {
  const auto next = [&] { return *x++; };
  const auto ints = [&] { return reinterpret_cast<int32_t*>(*x++); };
  MoeSortParams s{};
  s.experts = ints(), s.expert_offsets = ints(), s.pair_to_row = ints(), s.row_to_pair = ints();
  const int64_t tokens = next(), top_k = next();
  s.pairs = s.max_rows = int32_t(tokens * top_k), s.first_expert = int32_t(next()), s.num_experts = int32_t(next());
  s.align = 1;
  PermuteParams p{};
  p.pairs = {s.experts, s.expert_offsets, s.pair_to_row,  s.row_to_pair,
             tokens,    int32_t(top_k),   s.first_expert, s.num_experts};
  p.input = reinterpret_cast<const void*>(next()), p.element = Element(next());
  p.output.columns = p.input_stride = next();
  p.output.data = reinterpret_cast<void*>(next()), p.output.element = Element(next());
  p.output.scales = reinterpret_cast<float*>(next()), p.output.scale_stride = s.pairs;
  p.output.rounding = p.output.scales == nullptr               ? Rounding::kElement
                      : p.output.element == Element::kBFloat16 ? Rounding::kColumns
                      : launches == 5                          ? Rounding::kRows
                                                               : Rounding::kBlocks;
  std::vector<int32_t> workspace(MoeSortWorkspaceInts(s.pairs, s.num_experts));
  s.workspace = workspace.data(), s.has_clusters = launches == 3;
  if (launches == 1) return int(SortAndPermute(s, p, nullptr));
  const Status status = MoeSort(s, nullptr);
  if (status != cudaSuccess) return int(status);
  return int(launches == 4 ? QuantizeTokens(p, nullptr) : Permute(p, nullptr));
}
