// SPDX-License-Identifier: Apache-2.0
// Loads of queries, keys and values as floats from any storage: 16-bit, fp8, NVFP4, paged or not, rotated or not.
#pragma once
#include <cmath>
#include <type_traits>

#include "../../cpu/fp4.h"
#include "../../cpu/parallel.h"
#include "gemm.h"
#include "../common/params.h"

namespace flashinfer {
namespace attention {

/// Floats per row in scratch memory: whole registers, the last one padded with zeros.
constexpr int Padded(int head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

template <typename T>
inline void LoadRow(const T* from, int n, float* to) {
  cpu::ForEachVec(n, [&](int64_t i, auto lanes) { cpu::Store(to + i, cpu::Load(from + i, lanes)); });
}

/// Load a row of NVFP4: two E2M1 codes per byte, one e4m3 factor per 16 of them.
inline void LoadRowNvfp4(const uint8_t* codes, const uint8_t* factors, int n, float* to) {
  constexpr int BLOCK = 16;
  for (int block = 0; block < n / BLOCK; ++block) {
    const float factor = cpu::DecodeE4M3(factors[block]);
    for (int i = block * BLOCK; i < (block + 1) * BLOCK; i += LANES) {
      cpu::Store(to + i, cpu::LoadE2M1(codes + i / 2) * factor);
    }
  }
}

/// Prefetch a row. The keys of a head are far apart, and the hardware prefetcher does not see the pattern.
template <int BYTES>
inline void Prefetch(const void* row) {
  for (int at = 0; at < BYTES; at += 64) __builtin_prefetch(static_cast<const char*>(row) + at);
}

/// Address of the key or value of a position.
template <typename Params, bool PAGED>
struct KeyAddress {
  static constexpr bool IS_NVFP4 = std::is_same_v<typename Params::DTypeKV, uint8_t>;
  static constexpr int PE = Params::HEAD_DIM_PE, K_COLUMNS = Params::HEAD_DIM_QK - PE;
  const Params& params;
  int64_t kv_begin;
  int32_t kv_head;

  int64_t Offset(int32_t j, int64_t stride_page, int64_t stride_n, int64_t stride_h) const {
    if constexpr (PAGED) {
      const uint32_t page = params.page_size.Divide(uint32_t(j)), entry = uint32_t(j) - page * params.page_size.divisor;
      return params.kv_indices[kv_begin + page] * stride_page + entry * stride_n + kv_head * stride_h;
    } else {
      return (kv_begin + j) * stride_n + kv_head * stride_h;
    }
  }
  auto* Key(int32_t j) const {
    return params.k + Offset(j, params.k_stride_page, params.k_stride_n, params.k_stride_h);
  }
  auto* RotaryKey(int32_t j) const { return params.k_pe + Offset(j, params.k_pe_stride_page, params.k_pe_stride_n, 0); }
  auto* Value(int32_t j) const {
    return params.v + Offset(j, params.v_stride_page, params.v_stride_n, params.v_stride_h);
  }

  void LoadKey(int32_t j, float* to) const {
    if constexpr (IS_NVFP4) {
      const int64_t at = Offset(j, params.k_sf_stride_page, params.k_sf_stride_n, params.k_sf_stride_h);
      LoadRowNvfp4(Key(j), params.k_sf + at, K_COLUMNS, to);
    } else {
      LoadRow(Key(j), K_COLUMNS, to);
    }
    if constexpr (PE > 0) LoadRow(RotaryKey(j), PE, to + K_COLUMNS);
  }

  void LoadValue(int32_t j, float* to) const {
    if constexpr (IS_NVFP4) {
      const int64_t at = Offset(j, params.v_sf_stride_page, params.v_sf_stride_n, params.v_sf_stride_h);
      LoadRowNvfp4(Value(j), params.v_sf + at, Params::HEAD_DIM_VO, to);
    } else {
      LoadRow(Value(j), Params::HEAD_DIM_VO, to);
    }
  }

  void PrefetchRow(int32_t j) const {
    constexpr int SIZE = sizeof(typename Params::DTypeKV), PACKED = IS_NVFP4 ? 2 : 1;
    Prefetch<K_COLUMNS * SIZE / PACKED>(Key(j));
    if constexpr (!Params::SHARED_KV) Prefetch<Params::HEAD_DIM_VO * SIZE / PACKED>(Value(j));
  }
};

/// Rotation of (d, d + D / 2) by position * rcp_scale * rcp_theta^(2d / D), for consecutive positions: the next angle
/// is one rotation further, which costs a few multiplications instead of a sine and a cosine.
template <int D>
class Rotation {
 public:
  template <typename Params>
  explicit Rotation(const Params& params) {
    for (int d = 0; d < D / 2; ++d) {
      frequency_[d] = params.rope_rcp_scale * std::pow(params.rope_rcp_theta, 2.0 * d / D);
      step_cos_[d] = float(std::cos(frequency_[d]));
      step_sin_[d] = float(std::sin(frequency_[d]));
    }
  }

  void Seek(int32_t position) {
    for (int d = 0; d < D / 2; ++d) {
      const double angle = double(position) * frequency_[d];
      cos_[d] = float(std::cos(angle));
      sin_[d] = float(std::sin(angle));
    }
  }
  void Apply(float* row) const {
    for (int d = 0; d < D / 2; ++d) {
      const float x = row[d], y = row[d + D / 2];
      row[d] = x * cos_[d] - y * sin_[d];
      row[d + D / 2] = y * cos_[d] + x * sin_[d];
    }
  }
  void Advance() {
    for (int d = 0; d < D / 2; ++d) {
      const float c = cos_[d], s = sin_[d];
      cos_[d] = c * step_cos_[d] - s * step_sin_[d];
      sin_[d] = s * step_cos_[d] + c * step_sin_[d];
    }
  }

 private:
  double frequency_[D / 2];
  float step_cos_[D / 2], step_sin_[D / 2], cos_[D / 2], sin_[D / 2];
};

struct NoRotation {
  template <typename Params>
  explicit NoRotation(const Params&) {}
};

}  // namespace attention
}  // namespace flashinfer
