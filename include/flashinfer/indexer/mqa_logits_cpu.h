// SPDX-License-Identifier: Apache-2.0
// Index scores and their schedule on the CPU; formulas and parameters in mqa_logits.h. Splits of 256 keys over threads. A
// thread converts the queries of a request once, and each key once for all heads and slots.
//   test  pytest tests/indexer      bench  python benchmarks/bench_indexer.py
#pragma once
#include <cmath>
#include <cstring>
#include <vector>

#include "../cpu/parallel.h"
#include "../cpu/vec.h"
#include "mqa_logits.h"

namespace flashinfer {
namespace indexer {

/// Dot product of `n` floats, a multiple of 32.
inline float Dot(const float* x, const float* y, int n) {
  using namespace cpu;
  Vec even = Broadcast(0.f), odd = Broadcast(0.f);
  for (int i = 0; i < n; i += 2 * LANES) {
    even += Load(x + i) * Load(y + i);
    odd += Load(x + i + LANES) * Load(y + i + LANES);
  }
  return ReduceSum(even + odd);
}

/// Sum over the heads of one slot for one key. Params: those over pages, or over ragged keys.
template <typename Params>
inline float SumHeads(const Params& p, const float* q, const float* key, const float* weights) {
  float chain[CHAINS] = {};
  for (int h = 0; h < p.heads; ++h) {
    const float product = Dot(q + int64_t(h) * p.dim, key, p.dim);
    const float weight = weights[h * p.weights_stride_h];
    // Not max(), which would turn NaN into 0.
    chain[h % CHAINS] = std::fma(weight, product < 0.f ? 0.f : product, chain[h % CHAINS]);
  }
  return ((chain[0] + chain[1]) + chain[2]) + chain[3];
}

template <typename T>
void ScoreSplits(const MqaLogitsParams& p, const std::vector<int64_t>& before, int64_t begin, int64_t end) {
  const int64_t head_bytes = p.dim;
  cpu::Scratch q(int64_t(p.next_n) * p.heads * p.dim), key(p.dim);
  int held = -1, b = 0;
  for (int64_t split = begin; split < end; ++split) {
    while (before[b + 1] <= split) ++b;
    if (held != b) {
      held = b;
      for (int t = 0; t < p.next_n; ++t) {
        for (int h = 0; h < p.heads; ++h) {
          const auto* from = p.q + b * p.q_stride_b + t * p.q_stride_t + h * p.q_stride_h;
          float* to = &q[(int64_t(t) * p.heads + h) * p.dim];
          for (int i = 0; i < p.dim; i += cpu::LANES) cpu::Store(to + i, cpu::Load(from + i));
        }
      }
    }
    const int first = int(split - before[b]) * SPLIT, length = LengthOf(p, b);
    for (int pos = first; pos < length && pos < first + SPLIT; ++pos) {
      const int32_t page = p.block_tables[b * p.table_stride + pos / p.block_size];
      const int slot = pos % p.block_size;
      const uint8_t* bytes = p.kv + page * p.kv_stride_page;
      const auto* from = reinterpret_cast<const float8_e4m3_t*>(bytes + slot * head_bytes);
      for (int i = 0; i < p.dim; i += cpu::LANES) cpu::Store(&key[i], cpu::Load(from + i));
      float scale;
      std::memcpy(&scale, bytes + p.block_size * head_bytes + slot * int(sizeof(float)), sizeof(float));
      for (int t = 0; t < p.next_n; ++t) {
        const int64_t row = int64_t(b) * p.next_n + t;
        const float* weights = p.weights + row * p.weights_stride;
        const float sum = SumHeads(p, &q[int64_t(t) * p.heads * p.dim], &key[0], weights);
        static_cast<T*>(p.out)[row * p.out_stride + pos] = T(sum * scale);
      }
    }
  }
}

}  // namespace indexer

/// The schedule is not needed here: threads share the splits evenly.
inline Status MqaLogits(const MqaLogitsParams& p, Stream) {
  std::vector<int64_t> before(size_t(p.batch) + 1, 0);
  for (int b = 0; b < p.batch; ++b) before[b + 1] = before[b] + indexer::SplitsOf(indexer::LengthOf(p, b));
  const int64_t work =
      int64_t(indexer::SPLIT) * p.next_n * p.heads * p.dim / 8;  // a product costs less than an element
  cpu::ParallelFor(before.back(), work, [&](int64_t begin, int64_t end) {
    if (p.is_half) {
      indexer::ScoreSplits<float16_t>(p, before, begin, end);
    } else {
      indexer::ScoreSplits<float>(p, before, begin, end);
    }
  });
  return 0;
}

inline Status MqaSchedule(const MqaScheduleParams& p, Stream) {
  int total = 0;
  for (int b = 0; b < p.batch; ++b) total += indexer::SplitsOf(p.seq_lens[b * p.lens_stride]);
  for (int row = 0; row <= p.blocks; ++row) p.out[2 * row] = p.batch, p.out[2 * row + 1] = 0;
  const indexer::Shares shares(total, p.blocks);
  int begin = 0;
  for (int b = 0; b < p.batch; ++b) {
    const int count = indexer::SplitsOf(p.seq_lens[b * p.lens_stride]);
    indexer::WriteRows(p, shares, b, begin, count);
    begin += count;
  }
  return 0;
}

}  // namespace flashinfer
