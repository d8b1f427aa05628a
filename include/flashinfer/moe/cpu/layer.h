// SPDX-License-Identifier: Apache-2.0
// The stages of a mixture of experts around its products, on the CPU; parameters in moe/layer.h. A thread computes
// whole rows, so that the order of additions does not depend on the number of threads nor on other tokens.
//   test  pytest tests/fused_moe      bench  python benchmarks/bench_fused_moe.py
#pragma once
#include "../../cpu/parallel.h"
#include "rows.h"

namespace flashinfer {
namespace fused_moe {

/// Return the local expert of a pair that has one.
inline int32_t ExpertOf(const SortedPairs& p, int64_t pair) { return p.experts[pair] - p.first_expert; }

/// Call body(row, pair, scratch) for each row in use; scratch holds `floats`.
template <typename Body>
inline void ForEachRow(const SortedPairs& p, int64_t floats, const Body& body) {
  cpu::ParallelFor(p.expert_offsets[p.num_experts], floats, [&](int64_t begin, int64_t end) {
    const cpu::Scratch scratch(floats);
    for (int64_t row = begin; row < end; ++row) body(row, int64_t{p.row_to_pair[row]}, &scratch[0]);
  });
}

inline Status Permute(const PermuteParams& p, Stream) {
  const int64_t columns = p.output.columns;
  ForEachRow(p.pairs, columns, [&](int64_t row, int64_t pair, float* x) {
    gemm::WithElement(p.element, [&](auto type) {
      const auto* from = static_cast<decltype(type)>(p.input) + pair / p.pairs.top_k * p.input_stride;
      if (p.element == p.output.element) {  // a copy, also of codes that the caller quantised
        auto* to = static_cast<std::remove_const_t<std::remove_pointer_t<decltype(type)>>*>(p.output.data);
        return void(std::copy(from, from + columns, to + row * columns));
      }
      cpu::ForEachVec(columns, [&](int64_t i, auto lanes) { cpu::Store(x + i, cpu::Load(from + i, lanes), lanes); });
      WriteRow(p.output, row, ExpertOf(p.pairs, pair), x);
    });
  });
  return 0;
}

inline Status Activate(const ActivateParams& p, Stream) {
  const int64_t columns = p.output.columns;
  const bool is_gated = IsGated(p.activation.type);
  ForEachRow(p.pairs, 2 * columns, [&](int64_t row, int64_t pair, float* gate) {
    const int32_t expert = ExpertOf(p.pairs, pair);
    float* up = is_gated ? gate + columns : nullptr;
    if (is_gated) ReadSums(p.sums, row, expert, 0, columns, up);
    ReadSums(p.sums, row, expert, is_gated ? columns : 0, columns, gate);
    ActivateRow(p.activation, expert, columns, gate, up);
    WriteRow(p.output, row, expert, gate);
  });
  return 0;
}

inline Status Finalize(const FinalizeParams& p, Stream) {
  const int64_t columns = p.sums.columns, top_k = p.pairs.top_k;
  cpu::ParallelFor(p.pairs.tokens, columns * top_k, [&](int64_t begin, int64_t end) {
    const cpu::Scratch total(columns), addend(columns);
    for (int64_t token = begin; token < end; ++token) {
      std::fill(&total[0], &total[0] + columns, 0.f);
      for (int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair) {
        const int64_t row = p.pairs.pair_to_row[pair];
        if (row < 0) continue;
        ReadSums(p.sums, row, ExpertOf(p.pairs, pair), 0, columns, &addend[0]);
        const float scale = p.scales == nullptr ? 1.f : p.scales[pair];
        cpu::ForEachVec(columns, [&](int64_t i, auto lanes) {
          cpu::Store(&total[i], cpu::Load(&total[i], lanes) + cpu::Load(&addend[i], lanes) * scale, lanes);
        });
      }
      gemm::WithElement(p.element, [&](auto type) {
        auto* to = static_cast<std::remove_const_t<std::remove_pointer_t<decltype(type)>>*>(p.output);
        to += token * p.output_stride;
        cpu::ForEachVec(columns,
                        [&](int64_t i, auto lanes) { cpu::Store(to + i, cpu::Load(&total[i], lanes), lanes); });
      });
    }
  });
  return 0;
}

}  // namespace fused_moe
}  // namespace flashinfer
