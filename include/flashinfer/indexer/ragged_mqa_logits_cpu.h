// SPDX-License-Identifier: Apache-2.0
// Index scores over ragged keys on the CPU; formulas and parameters in mqa_logits.h. Threads share groups of eight tokens, which
// convert their queries once, and each key once for all of them.
//   test  pytest tests/indexer/test_ragged_mqa_logits.py      bench  python benchmarks/bench_indexer.py -k ragged
#pragma once
#include <algorithm>

#include "mqa_logits_cpu.h"

namespace flashinfer {
namespace indexer {

constexpr int GROUP_TOKENS = 8;

template <typename T>
void ScoreGroups(const RaggedMqaLogitsParams& p, int64_t begin, int64_t end) {
  const int64_t row = int64_t(p.heads) * p.dim;
  cpu::Scratch q(GROUP_TOKENS * row), key(p.dim);
  for (int64_t group = begin; group < end; ++group) {
    const int first = int(group) * GROUP_TOKENS, last = std::min(first + GROUP_TOKENS, p.tokens);
    int from = p.keys, to = 0;
    for (int t = first; t < last; ++t) {
      from = std::min(from, StartOf(p, t)), to = std::max(to, EndOf(p, t));
      for (int h = 0; h < p.heads; ++h) {
        const float8_e4m3_t* numbers = p.q + t * p.q_stride_n + h * p.q_stride_h;
        float* floats = &q[(t - first) * row + int64_t(h) * p.dim];
        for (int i = 0; i < p.dim; i += cpu::LANES) cpu::Store(floats + i, cpu::Load(numbers + i));
      }
    }
    for (int j = from; j < to; ++j) {
      const float8_e4m3_t* numbers = p.k + j * p.k_stride;
      for (int i = 0; i < p.dim; i += cpu::LANES) cpu::Store(&key[i], cpu::Load(numbers + i));
      for (int t = first; t < last; ++t) {
        if (j < StartOf(p, t) || j >= EndOf(p, t)) continue;
        const float sum = SumHeads(p, &q[(t - first) * row], &key[0], p.weights + t * p.weights_stride);
        static_cast<T*>(p.out)[t * p.out_stride + j] = T(sum * p.scales[j * p.scales_stride]);
      }
    }
  }
}

}  // namespace indexer

inline Status RaggedMqaLogits(const RaggedMqaLogitsParams& p, Stream) {
  const int64_t groups = (p.tokens + indexer::GROUP_TOKENS - 1) / indexer::GROUP_TOKENS;
  const int64_t work = int64_t(indexer::GROUP_TOKENS) * p.keys * p.heads * p.dim / 8;
  cpu::ParallelFor(groups, work, [&](int64_t begin, int64_t end) {
    if (p.is_half) {
      indexer::ScoreGroups<float16_t>(p, begin, end);
    } else {
      indexer::ScoreGroups<float>(p, begin, end);
    }
  });
  return 0;
}

}  // namespace flashinfer
