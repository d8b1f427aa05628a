// SPDX-License-Identifier: Apache-2.0
// Sampling on the CPU (definitions and parameters: sampling.h, arithmetic: sampling_math.h). Outputs over threads.
//   Sums are of integers, so this draws what the CUDA kernels draw, though it finds thresholds in its own way: a
//   histogram of the upper half of the keys, then a sort of the columns in the bin that holds the threshold.
//   test  pytest tests/sampling      bench  python benchmarks/bench_sampling.py --device cpu
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/vec.h"
#include "sampling.h"
#include "sampling_math.h"

namespace flashinfer {
namespace cpu {

using namespace sampling;

constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();

template <typename T>
inline T ValueOf(const PerRow<T>& parameter, int64_t row) {
  return parameter.values == nullptr ? parameter.value : parameter.values[std::min(row, parameter.count - 1)];
}

/// The largest of n numbers; NaN is left out.
inline float LargestOf(const float* x, int64_t n) {
  Vec largest = Broadcast(MINUS_INF);
  ForEachVec(n, [&](int64_t i, auto lanes) {
    Vec v = Load(x + i, lanes);
    if constexpr (std::is_same_v<decltype(lanes), SomeLanes>) {
      for (int lane = lanes.count; lane < LANES; ++lane) v[lane] = MINUS_INF;
    }
    largest = v > largest ? v : largest;
  });
  float result = largest[0];
  for (int i = 1; i < LANES; ++i) result = largest[i] > result ? largest[i] : result;
  return result;
}

typedef double DoubleVec __attribute__((vector_size(2 * VEC_BYTES)));
typedef int64_t LongVec __attribute__((vector_size(2 * VEC_BYTES)));

/// v with lanes i and i ^ BIT exchanged.
template <int BIT>
inline Vec SwapLanes(const Vec& v) {
  IntVec from;
  for (int i = 0; i < LANES; ++i) from[i] = i ^ BIT;
  return __builtin_shuffle(v, from);
}

/// Sum4 of each group of four lanes, in all of them.
inline Vec SumGroups(const Vec& v) {
  const Vec pairs = v + SwapLanes<1>(v);
  return pairs + SwapLanes<2>(pairs);
}

/// Lane i of vector i % 4.
inline Vec Interleave(const Vec (&v)[4]) {
  IntVec lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i % 4;
  const Vec low = lane == 0 ? v[0] : v[1], high = lane == 2 ? v[2] : v[3];
  return lane < 2 ? low : high;
}

/// Where the columns of a row that a filter keeps begin.
struct Threshold {
  uint32_t key;
  uint64_t kept_quanta;  // of all columns at or above it
};

/// Finds thresholds. Made once per thread: the histogram has 200 KB.
class Selector {
 public:
  /// The key that has fewer than `count` of the n keys above it and less than `quanta` quanta; the smallest if none has
  /// more. Keys of 0 do not count, unless the keys are SIGNED, which have no quanta.
  template <bool SIGNED>
  Threshold Find(const uint32_t* keys, int64_t n, uint64_t count, uint64_t quanta, const Scale& scale) {
    constexpr int SHIFT = 18;
    if (counts_.empty()) {
      counts_.resize(1 << (32 - SHIFT));
      quanta_.resize(1 << (32 - SHIFT));
    }
    uint32_t* const counts = counts_.data();
    uint64_t* const masses = quanta_.data();
    for (int64_t i = 0; i < n; ++i) ++counts[keys[i] >> SHIFT];
    if (!SIGNED) {
      for (int64_t i = 0; i < n; ++i) masses[keys[i] >> SHIFT] += QuantumOf(FromBits(keys[i]), scale);
      counts[0] -= std::count(keys, keys + n, 0);
    }
    uint32_t top = uint32_t(counts_.size()) - 1, bottom = 0;
    while (top > 0 && counts[top] == 0) --top;
    while (bottom < top && counts[bottom] == 0) ++bottom;
    if (counts[top] == 0) return {1, 0};
    uint64_t above = 0, quanta_above = 0;
    uint32_t bin = top;
    for (; bin > bottom && above + counts_[bin] < count && quanta_above + quanta_[bin] < quanta; --bin) {
      above += counts_[bin];
      quanta_above += quanta_[bin];
    }
    std::fill(counts_.begin() + bottom, counts_.begin() + top + 1, 0);
    std::fill(quanta_.begin() + bottom, quanta_.begin() + top + 1, 0);

    candidates_.clear();
    for (int64_t i = 0; i < n; ++i) {
      if (keys[i] >> SHIFT == bin && (SIGNED || keys[i] != 0)) candidates_.push_back(keys[i]);
    }
    std::sort(candidates_.begin(), candidates_.end(), std::greater<>());
    size_t i = 0;
    while (true) {  // equal keys are kept together
      const uint32_t key = candidates_[i];
      for (; i < candidates_.size() && candidates_[i] == key; ++i) {
        ++above;
        if (!SIGNED) quanta_above += QuantumOf(FromBits(key), scale);
      }
      if (i == candidates_.size() || above >= count || quanta_above >= quanta) return {key, quanta_above};
    }
  }

 private:
  std::vector<uint32_t> counts_, candidates_;
  std::vector<uint64_t> quanta_;
};

/// The smallest weight that top-k and top-p keep. `total_mass` is that of logits, 0 for probabilities.
inline float FilterThreshold(const FilterParams& filter, int64_t row, int64_t output, const float* weights, int64_t n,
                             int emax, uint64_t total_mass, Selector& selector) {
  const int64_t top_k = ValueOf(filter.top_k, filter.top_k_by_output ? output : row);
  const float top_p = ValueOf(filter.top_p, filter.top_p_by_output ? output : row);
  const uint64_t count = top_k >= n ? UNLIMITED : uint64_t(std::max<int64_t>(top_k, 1));
  const bool top_k_first = filter.filter == Filter::kTopKFirst;
  const uint64_t quanta = top_k_first       ? UNLIMITED
                          : total_mass != 0 ? QuantaLimitOf(top_p, total_mass >> 9)
                                            : QuantaLimit(top_p, emax);
  const auto* keys = reinterpret_cast<const uint32_t*>(weights);
  const Scale scale(emax);
  Threshold found{1, 0};
  const bool limits_mass = top_k_first && !(top_p >= 1.0f);
  if (count == UNLIMITED && quanta == UNLIMITED && !limits_mass) return 0.0f;
  found = selector.Find<false>(keys, n, count, quanta, scale);
  if (limits_mass) {
    const uint64_t limit = QuantaLimitOf(top_p, found.kept_quanta);
    found.key = std::max(found.key, selector.Find<false>(keys, n, UNLIMITED, limit, scale).key);
  }
  return FromBits(found.key);
}

/// A row of weights and what a draw needs of it. One per thread.
class Row {
 public:
  explicit Row(int64_t vocab)
      : n_(vocab), padded_((vocab + 4 * LANES - 1) / (4 * LANES) * (4 * LANES)), weights_(padded_) {
    segments_.resize((vocab + SEGMENT - 1) / SEGMENT);
    scales_.resize(segments_.size(), LogitScale(0.0f));
    shifts_.resize(segments_.size());
    for (int64_t i = vocab; i < padded_; ++i) weights_[i] = 0.0f;
  }

  float* weights() { return &weights_[0]; }
  Selector& selector() { return selector_; }

  /// Weights from probabilities, of which `minus` (null: nothing) is subtracted. Returns the largest.
  float SetWeights(const float* x, const float* minus) {
    float* w = weights();
    Vec largest{};
    const Vec zero{};
    ForEachVec(n_, [&](int64_t i, auto lanes) {
      Vec v = Load(x + i, lanes);
      if (minus != nullptr) v = v - Load(minus + i, lanes);
      v = v > zero ? v : zero;
      largest = v > largest ? v : largest;
      Store(w + i, v);
    });
    float result = 0.0f;
    for (int i = 0; i < LANES; ++i) result = std::max(result, largest[i]);
    return result;
  }

  /// Weights from logits, relative to the largest.
  void SetWeightsFromLogits(const float* x) {
    float* w = weights();
    const float shift = ShiftOf(LargestOf(x, n_));
#pragma omp simd
    for (int64_t i = 0; i < n_; ++i) w[i] = Positive(ExpWeight(x[i], 1.0f, shift));
  }

  /// Weights from logits times `factor`, those of a segment relative to a power of two; NaN is kept. Returns the sum of
  /// their masses.
  uint64_t SumUpLogits(const float* x, float factor) {
    threshold_ = 0.0f;
    emax_ = ONE;
    exponent_ = MINUS_INF;
    for (size_t s = 0; s < segments_.size(); ++s) {
      const int64_t begin = int64_t(s) * SEGMENT, n = std::min<int64_t>(SEGMENT, n_ - begin);
      float* w = weights() + begin;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) w[i] = x[begin + i] * factor;
      const float largest = LargestOf(w, n);
      if (AnyToLimit(largest)) std::transform(w, w + n, w, LimitLogit);
      const LogitScale scale = LogitScale::For(largest);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) w[i] = scale.Weight(w[i]);
      segments_[s] = SumSegment(begin, std::min(begin + SEGMENT, padded_), double(MASS_OF_ONE));
      scales_[s] = scale;
      exponent_ = std::max(exponent_, scale.exponent);
    }
    total_ = 0;
    for (size_t s = 0; s < segments_.size(); ++s) {
      shifts_[s] = scales_[s].ShiftTo(exponent_);
      total_ += segments_[s] >>= shifts_[s];
    }
    return total_;
  }

  /// What weights of SumUpLogits are multiplied by to be relative to the same power of two as their sum.
  float UnitOf(int64_t segment) const { return PowerOf2(int(scales_[segment].exponent - exponent_)); }

  /// Drop the weights below `threshold` from the masses, and sum these up. Returns the total.
  uint64_t SumUp(float threshold, int emax) {
    threshold_ = threshold;
    emax_ = emax;
    total_ = 0;
    // Units of mass per unit of weight: a power of two, in which a double is exact; then cut off as MassOf does.
    const double unit = std::ldexp(1.0, 40 + ONE - emax);
    for (size_t s = 0; s < segments_.size(); ++s) {
      const int64_t begin = int64_t(s) * SEGMENT, end = std::min(begin + SEGMENT, padded_);
      segments_[s] = emax > 0 && emax < 250 ? SumSegment(begin, end, unit) : SumSegmentExactly(begin, end);
      total_ += segments_[s];
    }
    return total_;
  }

  /// The column that `target` belongs to; the last positive one for a target above the total; -1 if there is none.
  int64_t Find(uint64_t target) const {
    if (target > total_) {
      for (int64_t i = n_ - 1; i >= 0; --i) {
        if (Kept(i) > 0.0f) return i;
      }
      return -1;
    }
    size_t s = 0;
    for (; segments_[s] < target; ++s) target -= segments_[s];
    uint64_t before = 0;
    const auto reaches = [&](float sum) { return (before + MassOf(sum, emax_)) >> shifts_[s] >= target; };
    for (int64_t i = int64_t(s) * SEGMENT;; i += 4) {
      const float group[4] = {Kept(i), Kept(i + 1), Kept(i + 2), Kept(i + 3)};
      const float sum = Sum4(group[0], group[1], group[2], group[3]);
      if (reaches(sum)) return i + ColumnWhere(group, reaches);
      before += MassOf(sum, emax_);
    }
  }

 private:
  float Kept(int64_t i) const {
    const float weight = i < n_ ? weights_[i] : 0.0f;
    return weight >= threshold_ && weight > 0.0f ? weight : 0.0f;
  }

  uint64_t SumSegment(int64_t begin, int64_t end, double unit) const {
    const float* w = &weights_[0];
    const Vec low = Broadcast(threshold_), limit = Broadcast(PowerOf2(emax_ - ONE + 4)), zero{};
    LongVec mass{};
    for (int64_t i = begin; i < end; i += 4 * LANES) {
      Vec sums[4];
      for (int j = 0; j < 4; ++j) {
        const Vec weight = Load(w + i + j * LANES), positive = weight > zero ? weight : zero;
        sums[j] = SumGroups(weight >= low ? positive : zero);
      }
      const Vec sum = Interleave(sums), limited = sum < limit ? sum : limit;
      mass += __builtin_convertvector(__builtin_convertvector(limited, DoubleVec) * unit, LongVec);
    }
    int64_t total = 0;
    for (int i = 0; i < LANES; ++i) total += mass[i];
    return uint64_t(total);
  }

  uint64_t SumSegmentExactly(int64_t begin, int64_t end) const {
    uint64_t mass = 0;
    for (int64_t i = begin; i < end; i += 4)
      mass += MassOf(Sum4(Kept(i), Kept(i + 1), Kept(i + 2), Kept(i + 3)), emax_);
    return mass;
  }

  int64_t n_, padded_;
  Scratch weights_;
  std::vector<uint64_t> segments_;  // masses, shifted
  std::vector<LogitScale> scales_;  // of SumUpLogits, as are the rest
  std::vector<int> shifts_;
  float exponent_ = 0.0f;
  Selector selector_;
  float threshold_ = 0.0f;
  int emax_ = ONE;
  uint64_t total_ = 0;
};

/// Weights, threshold and masses of a row; returns the mass that random bits are scaled to.
inline uint64_t Prepare(const SampleParams& p, int64_t input_row, int64_t output, Row& row) {
  const float* x = p.input + input_row * p.row_stride;
  const Filter filter = p.filter.filter;
  int emax = ONE;
  float largest = 1.0f, threshold = 0.0f;
  uint64_t total = 0;
  if (p.is_logits) {
    if (filter == Filter::kNone) return row.SumUpLogits(x, 1.0f);
    row.SetWeightsFromLogits(x);
    if (filter == Filter::kBoth) total = row.SumUp(0.0f, ONE);
  } else {
    largest = row.SetWeights(x, nullptr);
    if (filter == Filter::kNone) {
      row.SumUp(0.0f, ONE);
      return MASS_OF_ONE;
    }
    emax = BiasedExponent(largest);
  }
  if (filter == Filter::kMinP) {
    threshold = MinPThreshold(ValueOf(p.filter.top_p, p.filter.top_p_by_output ? output : input_row), largest);
  } else if (filter != Filter::kNone && largest > 0.0f) {
    threshold = FilterThreshold(p.filter, input_row, output, row.weights(), p.vocab, emax, total, row.selector());
  }
  return row.SumUp(threshold, emax);
}

inline int64_t InputRow(const SampleParams& p, int64_t output) {
  if (p.indices == nullptr) return output;
  const int64_t row =
      p.wide ? static_cast<const int64_t*>(p.indices)[output] : static_cast<const int32_t*>(p.indices)[output];
  return std::min(std::max<int64_t>(row, 0), p.rows - 1);
}

/// Whether outputs of the same row have the same filter.
inline bool IsShared(const FilterParams& f) {
  return !(f.top_k_by_output && f.top_k.values != nullptr) && !(f.top_p_by_output && f.top_p.values != nullptr);
}

}  // namespace cpu

template <bool SEARCH>
Status Sample(const SampleParams& p, Stream) {
  using namespace cpu;
  const bool is_shared = IsShared(p.filter);
  const int64_t cost = p.indices == nullptr ? p.vocab : std::max<int64_t>(p.vocab * p.rows / p.batch, 512);
  ParallelFor(p.batch, cost, [&](int64_t begin, int64_t end) {
    Row row(p.vocab);
    int64_t prepared = -1;
    uint64_t total = 0;
    for (int64_t output = begin; output < end; ++output) {
      const int64_t input_row = InputRow(p, output);
      if (input_row != prepared || !is_shared) total = Prepare(p, input_row, output, row);
      prepared = input_row;
      const uint64_t random =
          RandomBits(ValueOf(p.random.seed, output), ValueOf(p.random.offset, output), uint64_t(output));
      const int64_t column = row.Find(TargetOf(random, total));
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

inline Status SampleTop(const SampleParams& p, Stream stream) { return Sample<true>(p, stream); }

inline Status SampleByTable(const SampleParams& p, uint64_t*, Stream stream) { return Sample<true>(p, stream); }

template <typename T>
Status SoftmaxRows(const RowParams<T>& p, Stream) {
  using namespace cpu;
  ParallelFor(p.rows, p.vocab, [&](int64_t begin, int64_t end) {
    Row row(p.vocab);
    for (int64_t r = begin; r < end; ++r) {
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
      const float threshold =
          largest > 0.0f ? FilterThreshold(p.filter, r, r, row.weights(), p.vocab, emax, 0, row.selector()) : 0.0f;
      const uint64_t total = row.SumUp(threshold, emax);
      const float normaliser = total == 0 ? 0.0f : 512.0f / float(total);
      const Scale scale(emax);
      const float* w = row.weights();
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
        for (int64_t i = 0; i < p.vocab; ++i) keys[i] = OrderedKey(values[i]);
        threshold = selector.Find<true>(keys.data(), p.vocab, std::max<int64_t>(top_k, 1), UNLIMITED, Scale(ONE)).key;
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

      // The token after them: what the target has more than the draft; if that is nothing, what the target has.
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
