// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding on the CPU; formulas and parameters in rope.h.
// Frequencies are worked out once per call and the cosines and sines once per token, for all heads of all segments;
// what remains is one pass over memory.
//   test  pytest tests/rope      bench  python benchmarks/bench_rope.py
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/vec.h"
#include "rope.h"

namespace flashinfer {
namespace cpu {

inline int64_t IndexAt(const void* values, int64_t i, bool wide) {
  return wide ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
}

/// Find the position of a token. Returns false if no request holds the token.
inline bool TokenPosition(const RopePositions& p, int64_t token, int64_t& position) {
  if (p.pos_ids != nullptr) {
    position = IndexAt(p.pos_ids, token, p.wide);
    return true;
  }
  auto start = [&](int64_t request) { return IndexAt(p.indptr, request, p.wide); };
  if (token < start(0) || token >= start(p.requests)) return false;
  int64_t begin = 0, end = p.requests;  // the last request that starts at the token or before it is in [begin, end)
  while (end - begin > 1) {
    const int64_t middle = (begin + end) / 2;
    (start(middle) <= token ? begin : end) = middle;
  }
  position = IndexAt(p.offsets, begin, p.wide) + token - start(begin);
  return true;
}

/// Return the turns per position of each pair; empty if a cos/sin table is given.
inline std::vector<double> TurnsPerPosition(const RopeAngles& a, int64_t half) {
  std::vector<double> turns(a.cache == nullptr ? half : 0);
  for (size_t j = 0; j < turns.size(); ++j) {
    const double frequency = std::exp2(-static_cast<double>(j) * a.log2_step);
    const double smooth = std::clamp(a.ramp * frequency + a.shift, 0.0, 1.0);
    turns[j] = frequency * ((1 - smooth) * a.inv_scale + smooth) * 0.15915494309189535;  // 1 / (2 pi)
  }
  return turns;
}

/// Compute the sine and cosine of an angle in turns, |turns| <= 1/2, to about 1 ulp. Quarter turns are split off; the
/// remaining angle is at most pi/4, where the Taylor series to the 11th power have an error of 2e-9.
inline void SinCos(const Vec& turns, Vec& sine, Vec& cosine) {
  const Vec magic = Broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec quarters = (turns * 4.0f + magic) - magic;
  const Vec x = (turns - quarters * 0.25f) * 6.28318531f, square = x * x;
  Vec s = Broadcast(-1.0f / 39916800), c = Broadcast(-1.0f / 3628800);
  for (const float term : {1.0f / 362880, -1.0f / 5040, 1.0f / 120, -1.0f / 6, 1.0f}) s = s * square + term;
  for (const float term : {1.0f / 40320, -1.0f / 720, 1.0f / 24, -0.5f, 1.0f}) c = c * square + term;
  s *= x;
  const IntVec quarter = __builtin_convertvector(quarters, IntVec);
  const IntVec odd = (quarter & 1) != 0;
  sine = odd ? c : s;
  cosine = odd ? s : c;
  sine = (quarter & 2) != 0 ? -sine : sine;
  cosine = ((quarter + 1) & 2) != 0 ? -cosine : cosine;
}

/// Cosines and sines of one token, in the layout of the rows: R/2 each; interleaved: R each, every cosine twice and
/// every sine as -sin, sin.
class Rotation {
 public:
  Rotation(int64_t rotary_dim, bool interleave, const RopeAngles& angles, const std::vector<double>& turns)
      : half_(rotary_dim / 2),
        interleave_(interleave),
        angles_(angles),
        turns_(turns),
        cosine_(half_),
        sine_(half_),
        wide_cosine_(2 * half_),
        wide_sine_(2 * half_) {}

  void SetPosition(int64_t position) {
    if (angles_.cache != nullptr) {
      const float* row = angles_.cache + position * angles_.cache_stride;
      std::copy(row, row + half_, &cosine_[0]);
      std::copy(row + half_, row + 2 * half_, &sine_[0]);
    } else {
      constexpr double MAGIC = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
      for (int64_t j = 0; j < half_; ++j) {
        const double turns = position * turns_[j];
        sine_[j] = static_cast<float>(turns - ((turns + MAGIC) - MAGIC));
      }
      ForEachVec(half_, [&](int64_t j, auto lanes) {
        Vec sine, cosine;
        SinCos(Load(&sine_[j], lanes), sine, cosine);
        Store(&sine_[j], sine, lanes);
        Store(&cosine_[j], cosine, lanes);
      });
    }
    for (int64_t j = 0; interleave_ && j < half_; ++j) {
      wide_cosine_[2 * j] = wide_cosine_[2 * j + 1] = cosine_[j];
      wide_sine_[2 * j] = -sine_[j];
      wide_sine_[2 * j + 1] = sine_[j];
    }
  }

  template <typename T, typename Out>
  void Apply(const T* in, Out* out, float scale) const {
    if (interleave_) {
      ForEachVec(2 * half_, [&](int64_t i, auto lanes) {
        const Vec x = Load(in + i, lanes);
        const Vec y = x * Load(&wide_cosine_[i], lanes) + SwapNeighbours(x) * Load(&wide_sine_[i], lanes);
        Store(out + i, y * scale, lanes);
      });
    } else {
      ForEachVec(half_, [&](int64_t i, auto lanes) {
        const Vec x = Load(in + i, lanes), y = Load(in + half_ + i, lanes);
        const Vec cosine = Load(&cosine_[i], lanes), sine = Load(&sine_[i], lanes);
        Store(out + i, (x * cosine - y * sine) * scale, lanes);
        Store(out + half_ + i, (y * cosine + x * sine) * scale, lanes);
      });
    }
  }

 private:
  static Vec SwapNeighbours(const Vec& v) {
    typedef uint64_t Pairs __attribute__((vector_size(VEC_BYTES)));
    const Pairs pairs = BitCast<Pairs>(v);
    return BitCast<Vec>((pairs >> 32) | (pairs << 32));
  }

  int64_t half_;
  bool interleave_;
  const RopeAngles& angles_;
  const std::vector<double>& turns_;
  Scratch cosine_, sine_, wide_cosine_, wide_sine_;
};

/// Copy columns that are not rotated.
template <typename T, typename Out>
inline void CopyScaled(const T* in, Out* out, int64_t count, float scale) {
  if constexpr (std::is_same_v<T, Out>) {
    std::copy(in, in + count, out);
  } else {
    ForEachVec(count, [&](int64_t i, auto lanes) { Store(out + i, Load(in + i, lanes) * scale, lanes); });
  }
}

template <typename T, typename Out>
inline void RopeTokens(const RopeParams& p) {
  const std::vector<double> turns = TurnsPerPosition(p.angles, p.rotary_dim / 2);
  int64_t elements = 0;
  for (int i = 0; i < p.num_segments; ++i) elements += p.segments[i].heads * p.segments[i].width;

  ParallelFor(p.tokens, elements, [&](int64_t begin, int64_t end) {
    Rotation rotation(p.rotary_dim, p.interleave, p.angles, turns);
    for (int64_t token = begin; token < end; ++token) {
      int64_t position;
      Slot slot{};
      if (!TokenPosition(p.positions, token, position)) continue;
      if (p.pages.batch_indices != nullptr) {
        FindSlot(p.pages, token, &slot);
        if (slot.page < 0) continue;
      }
      rotation.SetPosition(position);
      for (const RopeSegment* s = p.segments; s < p.segments + p.num_segments; ++s) {
        const int64_t rotary = s->rotated ? p.rotary_dim : 0;
        const T* in = static_cast<const T*>(s->in) + token * s->in_token;
        Out* out = static_cast<Out*>(s->out) +
                   (s->paged ? slot.page * s->out_row + slot.entry * s->out_entry : token * s->out_row);
        const float scale = std::is_same_v<T, Out> ? 1.0f : s->scale;
        for (int64_t head = 0; head < s->heads; ++head, in += s->in_head, out += s->out_head) {
          if (s->rotated) rotation.Apply(in, out, scale);
          if (!s->InPlace()) CopyScaled(in + rotary, out + rotary, s->width - rotary, scale);
        }
      }
    }
  });
}

}  // namespace cpu

template <typename T>
Status Rope(const RopeParams& params, Stream) {
  switch (params.out_kind) {
    case RopeOut::kSame:
      cpu::RopeTokens<T, T>(params);
      break;
    case RopeOut::kE4M3:
      cpu::RopeTokens<T, float8_e4m3_t>(params);
      break;
    case RopeOut::kE5M2:
      cpu::RopeTokens<T, float8_e5m2_t>(params);
      break;
  }
  return 0;
}

}  // namespace flashinfer
