// SPDX-License-Identifier: Apache-2.0
// Sparse MLA on the CPU; formulas and parameters in params.h. Threads share tiles of eight heads of a token. Blocks of 16 keys
// are converted to float once for a tile, and the softmax goes on from block to block.
//   test  pytest tests/mla/test_sparse_mla.py      bench  python benchmarks/bench_sparse_mla.py
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "../../cpu/parallel.h"
#include "../../cpu/vec.h"
#include "params.h"

namespace flashinfer {
namespace sparse_mla {

constexpr int CPU_HEADS = 8, CPU_KEYS = 16;
constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();

/// Convert `n` numbers, a multiple of 16, times `scale`.
template <typename T>
inline void ToFloats(const void* from, int n, float scale, float* to) {
  const T* numbers = static_cast<const T*>(from);
  for (int i = 0; i < n; i += cpu::LANES) cpu::Store(to + i, cpu::Load(numbers + i) * scale);
}

/// Convert row `row` of the cache. The scale of a whole cache is left to scale_log2 and out_scale.
template <typename T, Cache CACHE, int D>
inline void LoadKey(const SparseMlaParams& p, int32_t row, float* to) {
  const int64_t page = p.page_size.Divide(uint32_t(row)), slot = row - page * p.page_size.divisor;
  const char* from = static_cast<const char*>(p.kv) + page * p.kv_stride_page + slot * p.kv_stride_slot;
  if constexpr (CACHE == Cache::kLikeQuery) {
    ToFloats<T>(from, D, 1.f, to);
  } else if constexpr (CACHE == Cache::kE4m3) {
    ToFloats<float8_e4m3_t>(from, D, 1.f, to);
  } else {
    float scales[D_V / SCALE_COLUMNS];
    std::memcpy(scales, from + D_V, sizeof(scales));
    for (int i = 0; i < D_V / SCALE_COLUMNS; ++i) {
      ToFloats<float8_e4m3_t>(from + i * SCALE_COLUMNS, SCALE_COLUMNS, scales[i], to + i * SCALE_COLUMNS);
    }
    ToFloats<bfloat16_t>(from + D_V + sizeof(scales), D_ROPE, 1.f, to + D_V);
  }
}

/// Sums and softmax state of up to CPU_HEADS heads of a token.
template <typename T, Cache CACHE, int D>
class Tile {
 public:
  explicit Tile(const SparseMlaParams& p)
      : p_(p), q_(CPU_HEADS * D), keys_(CPU_KEYS * D), o_(CPU_HEADS * D_V), weights_(CPU_HEADS * CPU_KEYS) {}

  void Run(int token, int first_head) {
    const int heads = std::min(CPU_HEADS, p_.heads - first_head);
    for (int h = 0; h < heads; ++h) {
      const T* q = static_cast<const T*>(p_.q) + token * p_.q_stride_n + (first_head + h) * p_.q_stride_h;
      ToFloats<T>(q, D, p_.scale_log2, &q_[h * D]);
      maximum_[h] = MINUS_INF, total_[h] = 0.f;
    }
    std::fill_n(&o_[0], heads * D_V, 0.f);
    const int32_t* indices = p_.indices + token * p_.indices_stride;
    int count = 0;
    for (int j = 0, n = LengthOf(p_, token); j < n; ++j) {
      if (indices[j] < 0) continue;
      LoadKey<T, CACHE, D>(p_, indices[j], &keys_[count++ * D]);
      if (count == CPU_KEYS) AddKeys(heads, std::exchange(count, 0));
    }
    if (count > 0) AddKeys(heads, count);
    for (int h = 0; h < heads; ++h) Write(token, first_head + h, &o_[h * D_V], maximum_[h], total_[h]);
  }

 private:
  void AddKeys(int heads, int count) {
    for (int h = 0; h < heads; ++h) {
      float* weights = &weights_[h * CPU_KEYS];
      float maximum = maximum_[h];
      for (int j = 0; j < count; ++j) {
        weights[j] = Dot(&q_[h * D], &keys_[j * D]);
        maximum = std::max(maximum, weights[j]);
      }
      const float base = maximum == MINUS_INF ? 0.f : maximum, scale = std::exp2(maximum_[h] - base);
      float total = total_[h] * scale;
      for (int j = 0; j < count; ++j) total += weights[j] = std::exp2(weights[j] - base);
      maximum_[h] = maximum, total_[h] = total;
      for (int i = 0; i < D_V; i += cpu::LANES) {
        cpu::Vec sum = cpu::Load(&o_[h * D_V + i]) * scale;
        for (int j = 0; j < count; ++j) sum += cpu::Load(&keys_[j * D + i]) * weights[j];
        cpu::Store(&o_[h * D_V + i], sum);
      }
    }
  }

  static float Dot(const float* x, const float* y) {
    cpu::Vec even{}, odd{};
    for (int i = 0; i < D; i += 2 * cpu::LANES) {
      even += cpu::Load(x + i) * cpu::Load(y + i);
      odd += cpu::Load(x + i + cpu::LANES) * cpu::Load(y + i + cpu::LANES);
    }
    return cpu::ReduceSum(even + odd);
  }

  void Write(int token, int head, const float* o, float maximum, float total) const {
    float scale = p_.out_scale;
    if (p_.sinks != nullptr) {
      const float sink = p_.sinks[head] * 1.44269504088896340736f, next = std::max(maximum, sink);
      const float base = next == MINUS_INF ? 0.f : next;
      scale *= std::exp2(maximum - base);
      total = total * std::exp2(maximum - base) + std::exp2(sink - base);
      maximum = next;
    }
    scale = total > 0.f || total != total ? scale / total : 0.f;
    T* to = static_cast<T*>(p_.out) + (int64_t(token) * p_.heads + head) * D_V;
    for (int i = 0; i < D_V; i += cpu::LANES) cpu::Store(to + i, cpu::Load(o + i) * scale);
    if (p_.lse == nullptr) return;
    p_.lse[int64_t(token) * p_.heads + head] = (total == 0.f ? MINUS_INF : maximum + std::log2(total)) * p_.lse_scale;
  }

  const SparseMlaParams& p_;
  cpu::Scratch q_, keys_, o_, weights_;
  float maximum_[CPU_HEADS], total_[CPU_HEADS];
};

}  // namespace sparse_mla

/// Keys are not split here: threads share tokens and heads.
template <typename T, sparse_mla::Cache CACHE, bool HAS_ROPE>
Status SparseMla(const SparseMlaParams& p, Stream) {
  constexpr int D = sparse_mla::D_V + (HAS_ROPE ? sparse_mla::D_ROPE : 0);
  const int64_t tiles = (p.heads + sparse_mla::CPU_HEADS - 1) / sparse_mla::CPU_HEADS;
  const int64_t work = int64_t(p.top_k + 1) * sparse_mla::CPU_HEADS * D / 8;  // a product costs less than an element
  cpu::ParallelFor(p.tokens * tiles, work, [&](int64_t begin, int64_t end) {
    sparse_mla::Tile<T, CACHE, D> tile(p);
    for (int64_t i = begin; i < end; ++i) tile.Run(int(i / tiles), int(i % tiles) * sparse_mla::CPU_HEADS);
  });
  return 0;
}

}  // namespace flashinfer
