// SPDX-License-Identifier: Apache-2.0
// The step kernel on the CPU (formulas: rules.h, parameters: step.h). A thread takes whole heads of whole sequences: it
// prepares the tokens of a head once (k and q normalised), then goes with each row of the state, which stays in L1,
// through all of them.
//   test  pytest tests/recurrent
#pragma once
#include <algorithm>
#include <cstdint>

#include "../../cpu/parallel.h"
#include "../../cpu/vec.h"
#include "../step.h"

namespace flashinfer {
namespace recurrent {
namespace cpu_step {

namespace c = flashinfer::cpu;

inline float LoadNumber(const void* data, int64_t i, ElementType type) {
  if (type == ElementType::kFloat) return static_cast<const float*>(data)[i];
  if (type == ElementType::kHalf) return float(static_cast<const c::float16*>(data)[i]);
  return float(static_cast<const c::bfloat16*>(data)[i]);
}

inline void StoreNumber(void* data, int64_t i, ElementType type, float x) {
  if (type == ElementType::kFloat) {
    static_cast<float*>(data)[i] = x;
  } else if (type == ElementType::kHalf) {
    static_cast<c::float16*>(data)[i] = c::float16(x);
  } else {
    static_cast<c::bfloat16*>(data)[i] = c::bfloat16(x);
  }
}

inline float Dot(const float* x, const float* y, int64_t n) {
  c::RunningSum sum;
  c::ForEachVec(n, [&](int64_t i, auto lanes) { sum.Add(c::Load(x + i, lanes) * c::Load(y + i, lanes)); });
  return sum.Total();
}

/// One head of one sequence: its tokens, prepared.
template <typename Rule, typename T, typename S>
class Head {
 public:
  Head(const StepParams& p, int64_t n, int64_t head, int64_t slot)
      : p_(p),
        n_(n),
        head_(head),
        key_head_(head / (p.value_heads / p.key_heads)),
        slot_(slot),
        range_(RangeAt(p, n, slot)),
        length_(p.ring.k != nullptr ? p.ring.lengths.At(n) : 0),
        count_(std::max<int64_t>(range_.count, 0)),
        k_(count_ * p.key_dim),
        q_(count_ * p.key_dim),
        decay_(count_ * (Rule::CHANNEL_DECAY ? p.key_dim : 1)),
        numbers_(3 * count_),
        row_(p.key_dim),
        ring_k_(length_ * p.key_dim),
        ring_weights_(length_) {
    for (int64_t t = 0; t < count_; ++t) Prepare(t);
    if (p_.ring.k != nullptr) PrepareRing();
  }

  void Run() {
    for (int64_t v = 0; v < p_.value_dim; ++v) RunRow(v);
    if (p_.ring.k != nullptr) AppendLogDecays();
  }

 private:
  static Range RangeAt(const StepParams& p, int64_t n, int64_t slot) {
    Range range = RangeOf(p, n);
    if (p.is_replay) range.sequence = slot;
    return range;
  }
  bool LeadsKeyHead() const { return head_ % (p_.value_heads / p_.key_heads) == 0; }
  int64_t RingRow(int64_t j) const {
    return ((p_.ring.bases.data != nullptr ? p_.ring.bases.At(n_) : 0) + j) % p_.ring.rows;
  }
  int64_t RingNumber(int64_t j) const { return slot_ * p_.ring.g_slot + head_ * p_.ring.rows + RingRow(j); }
  bool IsFlushed() const { return p_.final.data != nullptr && length_ >= p_.ring.flush_at; }

  float& Beta(int64_t t) { return numbers_[t]; }
  float& KeyQuery(int64_t t) { return numbers_[count_ + t]; }
  float& LogDecay(int64_t t) { return numbers_[2 * count_ + t]; }

  void Prepare(int64_t t) {
    const int64_t K = p_.key_dim, token = range_.first + t, sequence = range_.sequence;
    const T* k = static_cast<const T*>(p_.k) + p_.k_stride.Offset(sequence, token, key_head_);
    const T* q = static_cast<const T*>(p_.q) + p_.q_stride.Offset(sequence, token, key_head_);
    const bool has_q = p_.out != nullptr;
    float* to_k = &k_[t * K];
    float* to_q = &q_[t * K];
    c::ForEachVec(K, [&](int64_t i, auto lanes) {
      c::Store(to_k + i, c::Load(k + i, lanes), lanes);
      c::Store(to_q + i, has_q ? c::Load(q + i, lanes) : c::Vec{}, lanes);
    });
    const float k_factor = p_.normalise ? 1.f / std::sqrt(Dot(to_k, to_k, K) + 1e-6f) : 1.f;
    const float q_factor = (p_.normalise ? 1.f / std::sqrt(Dot(to_q, to_q, K) + 1e-6f) : 1.f) * p_.scale;
    for (int64_t i = 0; i < K; ++i) to_k[i] *= k_factor, to_q[i] *= q_factor;
    KeyQuery(t) = Dot(to_k, to_q, K);

    const float b = LoadNumber(p_.b.data, p_.b.stride.Offset(sequence, token, head_), p_.b.type);
    Beta(t) = p_.beta_is_logit ? Sigmoid(b) : b;
    PrepareDecay(t);
    Record(t, k);
  }

  void PrepareDecay(int64_t t) {
    const int64_t token = range_.first + t;
    const float a_log = p_.a_log == nullptr ? 0.f : p_.a_log[head_];
    const auto bias = [&](int64_t i) {
      return p_.dt_bias.data == nullptr
                 ? 0.f
                 : LoadNumber(p_.dt_bias.data, head_ * p_.dt_bias.stride.head + i, p_.dt_bias.type);
    };
    if constexpr (Rule::CHANNEL_DECAY) {
      const T* g = static_cast<const T*>(p_.g) + p_.g_stride.Offset(range_.sequence, token, head_);
      for (int64_t i = 0; i < p_.key_dim; ++i) {
        decay_[t * p_.key_dim + i] = std::exp(Rule::LogDecay(float(g[i]), a_log, bias(i), p_.gate, p_.lower_bound));
      }
    } else {
      const float a = LoadNumber(p_.a.data, p_.a.stride.Offset(range_.sequence, token, head_), p_.a.type);
      LogDecay(t) =
          p_.form == GateForm::kGiven ? a : Rule::LogDecay(a, a_log, bias(0), p_.softplus_beta, p_.softplus_threshold);
      decay_[t] = std::exp(LogDecay(t));
    }
  }

  void Record(int64_t t, const T* k) {
    const Recordings& r = p_.record;
    const int64_t K = p_.key_dim, token = range_.first + t;
    if (r.values != nullptr) {
      const T* v = static_cast<const T*>(p_.v) + p_.v_stride.Offset(range_.sequence, token, head_);
      auto* to = static_cast<c::bfloat16*>(r.values) + slot_ * r.value_slot + (head_ * p_.tokens + t) * p_.value_dim;
      for (int64_t i = 0; i < p_.value_dim; ++i) to[i] = c::bfloat16(float(v[i]));
    }
    if (r.betas != nullptr) {
      r.betas[slot_ * r.number_slot + head_ * p_.tokens + t] = Beta(t);
      r.log_decays[slot_ * r.number_slot + head_ * p_.tokens + t] = LogDecay(t);
    }
    if (r.keys == nullptr || !(r.gates || LeadsKeyHead())) return;
    const int64_t width = r.gates ? 2 * K : K, head = r.gates ? head_ : key_head_;
    auto* to = static_cast<c::bfloat16*>(r.keys) + slot_ * r.key_slot + (head * p_.tokens + t) * width;
    for (int64_t i = 0; i < K; ++i) to[i] = c::bfloat16(float(k[i]));
    if (r.gates) {
      const T* g = static_cast<const T*>(p_.g) + p_.g_stride.Offset(range_.sequence, token, head_);
      for (int64_t i = 0; i < K; ++i) to[K + i] = c::bfloat16(float(g[i]));
    }
  }

  /// Read the live rows of the ring and append the keys of this call.
  void PrepareRing() {
    const int64_t K = p_.key_dim;
    const float last = length_ > 0 ? p_.ring.g[RingNumber(length_ - 1)] : 0.f;
    const auto key_at = [&](int64_t j) { return slot_ * p_.ring.k_slot + (key_head_ * p_.ring.rows + RingRow(j)) * K; };
    fold_ = std::exp(last);
    for (int64_t j = 0; j < length_; ++j) {
      ring_weights_[j] = std::exp(last - p_.ring.g[RingNumber(j)]);
      for (int64_t i = 0; i < K; ++i) ring_k_[j * K + i] = LoadNumber(p_.ring.k, key_at(j) + i, p_.ring.type);
    }
    if (!LeadsKeyHead()) return;
    for (int64_t t = 0; t < count_; ++t) {
      for (int64_t i = 0; i < K; ++i) StoreNumber(p_.ring.k, key_at(length_ + t) + i, p_.ring.type, k_[t * K + i]);
    }
  }

  void AppendLogDecays() {
    float sum = length_ > 0 && !IsFlushed() ? p_.ring.g[RingNumber(length_ - 1)] : 0.f;
    for (int64_t t = 0; t < count_; ++t) p_.ring.g[RingNumber(length_ + t)] = sum += LogDecay(t);
  }

  int64_t RingValue(int64_t j, int64_t v) const {
    return slot_ * p_.ring.u_slot + (head_ * p_.ring.rows + RingRow(j)) * p_.value_dim + v;
  }

  void FoldRing(int64_t v) {
    const int64_t K = p_.key_dim;
    for (int64_t i = 0; i < K; ++i) row_[i] *= fold_;
    for (int64_t j = 0; j < length_; ++j) {
      const float u = ring_weights_[j] * LoadNumber(p_.ring.u, RingValue(j, v), p_.ring.type);
      AddRow(u, &ring_k_[j * K]);
    }
    if (IsFlushed()) StoreRow(p_.final, p_.final.slots.At(n_), 0, v);
  }

  void AddRow(float u, const float* k) {
    c::ForEachVec(p_.key_dim, [&](int64_t i, auto lanes) {
      c::Store(&row_[i], c::Load(&row_[i], lanes) + u * c::Load(k + i, lanes), lanes);
    });
  }

  void StoreRow(const States& to, int64_t slot, int64_t token, int64_t v) const {
    if (slot < p_.first_slot) return;
    S* at = static_cast<S*>(to.data) + to.Offset(slot, token, head_, v);
    c::ForEachVec(p_.key_dim, [&](int64_t i, auto lanes) { c::Store(at + i, c::Load(&row_[i], lanes), lanes); });
  }

  /// Store a checkpoint if one is due before (or after) token t.
  void StoreCheckpoint(bool before, int64_t t, int64_t v) const {
    const Checkpoints& c = p_.checkpoints;
    const bool in_pool = c.rows.data != nullptr;
    const int64_t done = before ? t : t + 1;
    if (c.states.data == nullptr || in_pool == before || done % c.every != 0) return;
    const int64_t j = c.starts.At(n_) + done / c.every - (in_pool ? 1 : 0);
    StoreRow(c.states, in_pool ? c.rows.At(j) : j, 0, v);
  }

  void LoadRow(int64_t v) {
    if (p_.initial.data == nullptr) {
      std::fill_n(&row_[0], p_.key_dim, 0.f);
      return;
    }
    const S* from = static_cast<const S*>(p_.initial.data) + p_.initial.Offset(slot_, 0, head_, v);
    c::ForEachVec(p_.key_dim, [&](int64_t i, auto lanes) { c::Store(&row_[i], c::Load(from + i, lanes), lanes); });
  }

  /// Apply the decay of token t and return the dot products with k and q.
  void Decay(int64_t t, float& sk, float& sq) {
    const int64_t K = p_.key_dim;
    c::RunningSum k_sum, q_sum;
    c::ForEachVec(K, [&](int64_t i, auto lanes) {
      c::Vec s = c::Load(&row_[i], lanes);
      if constexpr (Rule::CHANNEL_DECAY) {
        s *= c::Load(&decay_[t * K + i], lanes);
      } else {
        s *= decay_[t];
      }
      c::Store(&row_[i], s, lanes);
      k_sum.Add(s * c::Load(&k_[t * K + i], lanes));
      q_sum.Add(s * c::Load(&q_[t * K + i], lanes));
    });
    sk = k_sum.Total(), sq = q_sum.Total();
  }

  void RunRow(int64_t v) {
    const int64_t K = p_.key_dim;
    const bool has_ring = p_.ring.k != nullptr, writes_final = p_.final.data != nullptr && !has_ring;
    const bool is_pool = p_.each.slots.data != nullptr;
    LoadRow(v);
    if (has_ring) FoldRing(v);
    if (writes_final && range_.boundary == 0) StoreRow(p_.final, p_.final.slots.At(n_), 0, v);
    for (int64_t t = 0; t < count_; ++t) {
      const int64_t token = range_.first + t;
      StoreCheckpoint(true, t, v);
      float sk, sq;
      Decay(t, sk, sq);
      const int64_t from = p_.v_stride.Offset(range_.sequence, token, head_) + v;
      const float u = Rule::Correction(float(static_cast<const T*>(p_.v)[from]), sk, Beta(t));
      AddRow(u, &k_[t * K]);
      if (p_.out != nullptr) {
        const int64_t to = p_.out_stride.Offset(range_.sequence, token, head_) + v;
        StoreNumber(p_.out, to, p_.out_type, sq + u * KeyQuery(t));
      }
      if (has_ring) StoreNumber(p_.ring.u, RingValue(length_ + t, v), p_.ring.type, u);
      if (p_.record.corrections != nullptr) {
        const int64_t to = slot_ * p_.record.correction_slot + (head_ * p_.tokens + t) * p_.value_dim + v;
        p_.record.corrections[to] = u;
      }
      if (p_.each.data != nullptr && (!is_pool || t < range_.boundary)) {
        StoreRow(p_.each, is_pool ? p_.each.slots.At(n_, t) : n_, is_pool ? 0 : t, v);
      }
      StoreCheckpoint(false, t, v);
      if (writes_final && t + 1 == range_.boundary) StoreRow(p_.final, p_.final.slots.At(n_), 0, v);
    }
  }

  const StepParams& p_;
  const int64_t n_, head_, key_head_, slot_;
  const Range range_;
  const int64_t length_, count_;  // live rows of the ring, tokens
  const c::Scratch k_, q_, decay_, numbers_, row_, ring_k_, ring_weights_;
  float fold_ = 1.f;
};

/// Outputs of a sequence that is skipped.
inline void ZeroOutputs(const StepParams& p, const Range& range, int64_t head) {
  if (!p.zero_skipped || p.out == nullptr) return;
  for (int64_t t = 0; t < range.count; ++t) {
    const int64_t to = p.out_stride.Offset(range.sequence, range.first + t, head);
    for (int64_t v = 0; v < p.value_dim; ++v) StoreNumber(p.out, to + v, p.out_type, 0.f);
  }
}

}  // namespace cpu_step

template <typename Rule, typename T, typename S>
Status Step(const StepParams& p, Stream) {
  const int64_t heads = p.sequences * p.value_heads;
  cpu::ParallelFor(heads, p.value_dim * p.key_dim * std::max<int64_t>(p.tokens, 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = i / p.value_heads, head = i % p.value_heads, slot = ReadSlot(p, n);
      const Range range = RangeOf(p, n);
      if (range.count <= 0 && range.boundary != 0) continue;
      if (slot < p.first_slot) {
        cpu_step::ZeroOutputs(p, range, head);
      } else {
        cpu_step::Head<Rule, T, S>(p, n, head, slot).Run();
      }
    }
  });
  return 0;
}

}  // namespace recurrent
}  // namespace flashinfer
