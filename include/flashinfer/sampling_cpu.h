// SPDX-License-Identifier: Apache-2.0
// Sampling on the CPU (definitions and parameters: sampling.h, arithmetic: sampling/fixed_point.h). Outputs over
// threads.
//   Sums are of integers, so this draws what the CUDA kernels draw, though it finds thresholds in its own way.
//   sampling/row_cpu.h  a row of weights      sampling/threshold_cpu.h  thresholds      cpu/top_k_bound.h  bounds of them
//   test  pytest tests/sampling      bench  python benchmarks/bench_sampling.py --device cpu
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/vec.h"
#include "sampling/row_cpu.h"
#include "sampling/threshold_cpu.h"

namespace flashinfer {
namespace cpu {

/// Compute the weights, threshold and masses of a row. Returns the total mass that random bits are scaled to.
inline uint64_t Prepare(const SampleParams& p, int64_t input_row, int64_t output, Row& row) {
  const float* x = p.input + input_row * p.row_stride;
  const Filter filter = p.filter.filter;
  if (p.is_logits) return row.SumUpLogits(x, 1.0f);
  const float largest = row.SetWeights(x, nullptr);
  if (filter == Filter::kNone) {
    row.SumUp(0.0f, ONE);
    return MASS_OF_ONE;
  }
  if (filter == Filter::kMinP) {
    const float min_p = ValueOf(p.filter.top_p, p.filter.top_p_by_output ? output : input_row);
    return row.SumUp(MinPThreshold(min_p, largest), BiasedExponent(largest));
  }
  const int emax = ExponentOfProbs(largest);
  float threshold = 0.0f;
  if (largest > 0.0f) {
    threshold = FilterThreshold(p.filter, input_row, output, row.weights(), p.vocab, emax, row.selector());
  }
  return row.SumUpByColumn(threshold, emax);
}

inline int64_t InputRow(const SampleParams& p, int64_t output) {
  if (p.indices == nullptr) return output;
  const int64_t row =
      p.wide ? static_cast<const int64_t*>(p.indices)[output] : static_cast<const int32_t*>(p.indices)[output];
  return std::min(std::max<int64_t>(row, 0), p.rows - 1);
}

/// True if outputs of the same row have the same filter.
inline bool IsShared(const FilterParams& f) {
  return !(f.top_k_by_output && f.top_k.values != nullptr) && !(f.top_p_by_output && f.top_p.values != nullptr);
}

}  // namespace cpu

inline Status Sample(const SampleParams& p, Stream) {
  using namespace cpu;
  const bool is_shared = IsShared(p.filter);
  const bool is_found_early = p.indices == nullptr && !p.is_logits && p.filter.filter == Filter::kNone;
  const int64_t cost = p.indices == nullptr ? p.vocab : std::max<int64_t>(p.vocab * p.rows / p.batch, 512);
  ParallelFor(p.batch, cost, [&](int64_t begin, int64_t end) {
    Row row(p.vocab);
    int64_t prepared = -1;
    uint64_t total = 0;
    for (int64_t output = begin; output < end; ++output) {
      const int64_t input_row = InputRow(p, output);
      const uint64_t random =
          RandomBits(ValueOf(p.random.seed, output), ValueOf(p.random.offset, output), uint64_t(output));
      int64_t column;
      if (is_found_early) {
        column = row.FindInProbs(p.input + input_row * p.row_stride, TargetOf(random, MASS_OF_ONE));
      } else {
        if (input_row != prepared || !is_shared) total = Prepare(p, input_row, output, row);
        prepared = input_row;
        column = row.Find(TargetOf(random, total));
      }
      const int64_t token = std::max<int64_t>(column, 0);
      if (p.wide) {
        static_cast<int64_t*>(p.out)[output] = token;
      } else {
        static_cast<int32_t*>(p.out)[output] = int32_t(token);
      }
      if (p.valid != nullptr) p.valid[output] = column >= 0;
    }
  });
  return 0;
}

inline Status SampleTop(const SampleParams& p, Stream stream) { return Sample(p, stream); }

inline Status SampleByTable(const SampleParams& p, uint64_t*, Stream stream) { return Sample(p, stream); }

template <typename T>
Status SoftmaxRows(const RowParams<T>& p, Stream) {
  using namespace cpu;
  ParallelFor(p.rows, p.vocab, [&](int64_t begin, int64_t end) {
    Row row(p.vocab);
    for (int64_t r = begin; r < end; ++r) {
      if constexpr (std::is_same_v<T, float>) row.HoldIn(p.out + r * p.out_stride);
      const uint64_t total = row.SumUpLogits(p.input + r * p.input_stride, FactorOf(ValueOf(p.temperature, r)));
      const Normaliser normaliser(total);
      for (int64_t begin = 0; begin < p.vocab; begin += SEGMENT) {
        const int64_t n = std::min<int64_t>(SEGMENT, p.vocab - begin);
        const float unit = row.UnitOf(begin / SEGMENT), share = unit * normaliser.inverse;
        const float* w = row.weights() + begin;
        T* out = p.out + r * p.out_stride + begin;
        if (normaliser.IsPeaked()) {
#pragma omp simd
          for (int64_t i = 0; i < n; ++i) out[i] = normaliser(w[i] * unit);
        } else {
          ForEachVec(n, [&](int64_t i, auto lanes) { Store(out + i, Load(w + i) * share, lanes); });
        }
      }
    }
  });
  return 0;
}

template <typename T>
Status RenormRows(const RowParams<T>& p, Stream) {
  using namespace cpu;
  ParallelFor(p.rows, p.vocab, [&](int64_t begin, int64_t end) {
    Row row(p.vocab);
    const Scratch input(p.vocab);
    for (int64_t r = begin; r < end; ++r) {
      const T* x = p.input + r * p.input_stride;
      ForEachVec(p.vocab, [&](int64_t i, auto lanes) { Store(&input[i], Load(x + i, lanes), lanes); });
      const float largest = row.SetWeights(&input[0], nullptr);
      const int emax = BiasedExponent(largest);
      const float* w = row.weights();
      Keys searched{nullptr, 0};
      const float threshold =
          largest > 0.0f ? FilterThreshold(p.filter, r, r, w, p.vocab, emax, row.selector(), &searched) : 0.0f;
      const Scale scale(emax);
      uint64_t total = 0;
      for (int64_t i = 0; i < searched.size; ++i) {
        if (searched.data[i] >= Bits(threshold)) total += ColumnMass(FromBits(searched.data[i]), scale);
      }
      const float normaliser = total == 0 ? 0.0f : 512.0f / float(total);
      T* out = p.out + r * p.out_stride;
      const Vec zero{}, low = Broadcast(threshold);
      ForEachVec(p.vocab, [&](int64_t i, auto lanes) {
        const Vec weight = Load(w + i);
        const Vec scaled = weight * scale.first * scale.second * normaliser;
        Store(out + i, weight >= low ? scaled : zero, lanes);
      });
    }
  });
  return 0;
}

template <typename T>
Status MaskRows(const RowParams<T>& p, Stream) {
  using namespace cpu;
  ParallelFor(p.rows, p.vocab, [&](int64_t begin, int64_t end) {
    Selector selector;
    const Scratch values(p.vocab);
    std::vector<uint32_t> keys(p.vocab);
    for (int64_t r = begin; r < end; ++r) {
      const T* x = p.input + r * p.input_stride;
      T* out = p.out + r * p.out_stride;
      ForEachVec(p.vocab, [&](int64_t i, auto lanes) { Store(&values[i], Load(x + i, lanes), lanes); });
      const int64_t top_k = ValueOf(p.filter.top_k, r);
      uint32_t threshold = 0;
      if (top_k < p.vocab) {
        const uint64_t count = std::max<int64_t>(top_k, 1);
        for (int64_t i = 0; i < p.vocab; ++i) keys[i] = OrderedKey(values[i]);
        const float low = selector.Bound(&values[0], p.vocab, count);
        Keys largest{keys.data(), p.vocab};
        if (low > MINUS_INF) {
          const Keys kept = selector.RowFilter(&values[0], p.vocab, low, OrderedKey);
          if (uint64_t(kept.size) >= count) largest = kept;
        }
        threshold = selector.Find<true>(largest, {count, UNLIMITED}, Scale(ONE)).key;
        for (int64_t i = 0; i < p.vocab; ++i) values[i] = keys[i] >= threshold ? values[i] : MINUS_INF;
      }
      ForEachVec(p.vocab, [&](int64_t i, auto lanes) { Store(out + i, Load(&values[i], lanes), lanes); });
    }
  });
  return 0;
}

inline Status ChainSpeculativeSample(const SpeculativeParams& p, Stream) {
  using namespace cpu;
  ParallelFor(p.batch, p.vocab, [&](int64_t begin, int64_t end) {
    Row row(p.vocab);
    for (int64_t request = begin; request < end; ++request) {
      const uint64_t seed = ValueOf(p.random.seed, request), offset = ValueOf(p.random.offset, request);
      const float* draft = p.draft_probs + request * p.drafts * p.vocab;
      const float* target = p.target_probs + request * (p.drafts + 1) * p.vocab;
      const int32_t* ids = p.draft_ids + request * p.drafts;
      int32_t* out = p.out + request * (p.drafts + 1);
      int64_t position = p.drafts;
      int32_t passed = 0;
      for (int64_t i = 0; i < p.drafts; ++i) {
        const int64_t id = ids[i];
        const bool accept = id >= 0 && id < p.vocab &&
                            RandomUnit(seed, offset + i, request) * draft[i * p.vocab + id] < target[i * p.vocab + id];
        passed += accept;
        if (!accept && position == p.drafts) position = i;
      }
      p.accepted[request] += passed;
      p.emitted[request] += int32_t(position);
      for (int64_t i = 0; i <= p.drafts; ++i) out[i] = i < position ? ids[i] : -1;

      // The next token is sampled from the positive part of target - draft; if that is empty, from the target.
      const float* wanted = target + position * p.vocab;
      float largest = 0.0f;
      if (position < p.drafts) largest = row.SetWeights(wanted, draft + position * p.vocab);
      if (!(largest > 0.0f)) largest = row.SetWeights(wanted, nullptr);
      const uint64_t total = row.SumUp(0.0f, BiasedExponent(largest));
      const uint64_t random = RandomBits(seed, offset + p.drafts, request);
      out[position] = int32_t(std::max<int64_t>(row.Find(TargetOf(random, total)), 0));
    }
  });
  return 0;
}

}  // namespace flashinfer
