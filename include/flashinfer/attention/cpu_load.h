// SPDX-License-Identifier: Apache-2.0
// Rows of queries, keys and values as floats, whatever they are stored as: 16-bit, fp8, NVFP4, in pages or not, rotated
// or not.
#pragma once
#include <cmath>
#include <type_traits>

#include "../cpu/fp4.h"
#include "../cpu/parallel.h"
#include "params.h"

namespace flashinfer {
namespace attention {

using cpu::LANES;
using cpu::Vec;

/// Floats of a row in scratch memory: whole registers, the last of them filled up with zeros.
constexpr int Padded(int head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

template <typename T>
inline void LoadRow(const T* from, int n, float* to) {
  cpu::ForEachVec(n, [&](int64_t i, auto lanes) { cpu::Store(to + i, cpu::Load(from + i, lanes)); });
}

/// Two E2M1 codes a byte, one e4m3 factor for 16 of them.
inline void LoadRowNvfp4(const uint8_t* codes, const uint8_t* factors, int n, float* to) {
  constexpr int BLOCK = 16;
  for (int block = 0; block < n / BLOCK; ++block) {
    const float factor = cpu::DecodeE4M3(factors[block]);
    for (int i = block * BLOCK; i < (block + 1) * BLOCK; i += LANES) {
      cpu::Store(to + i, cpu::LoadE2M1(codes + i / 2) * factor);
    }
  }
}

/// Where the key or value of a position is.
template <typename Params, bool PAGED>
struct KeyAddress {
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

  void LoadKey(int32_t j, float* to) const {
    constexpr int PE = Params::HEAD_DIM_PE, D = Params::HEAD_DIM_QK - PE;
    const int64_t at = Offset(j, params.k_stride_page, params.k_stride_n, params.k_stride_h);
    if constexpr (std::is_same_v<typename Params::DTypeKV, uint8_t>) {
      LoadRowNvfp4(params.k + at,
                   params.k_sf + Offset(j, params.k_sf_stride_page, params.k_sf_stride_n, params.k_sf_stride_h), D, to);
    } else {
      LoadRow(params.k + at, D, to);
    }
    if constexpr (PE > 0)
      LoadRow(params.k_pe + Offset(j, params.k_pe_stride_page, params.k_pe_stride_n, 0), PE, to + D);
  }

  void LoadValue(int32_t j, float* to) const {
    const int64_t at = Offset(j, params.v_stride_page, params.v_stride_n, params.v_stride_h);
    if constexpr (std::is_same_v<typename Params::DTypeKV, uint8_t>) {
      LoadRowNvfp4(params.v + at,
                   params.v_sf + Offset(j, params.v_sf_stride_page, params.v_sf_stride_n, params.v_sf_stride_h),
                   Params::HEAD_DIM_VO, to);
    } else {
      LoadRow(params.v + at, Params::HEAD_DIM_VO, to);
    }
  }
};

/// Rotation of (d, d + D / 2) by position * rcp_scale * rcp_theta^(2d / D).
template <int D>
class Rotation {
 public:
  Rotation(double rcp_scale, double rcp_theta) : frequency_(D / 2), cos_(D / 2), sin_(D / 2) {
    for (int d = 0; d < D / 2; ++d) frequency_[d] = float(rcp_scale * std::pow(rcp_theta, 2.0 * d / D));
  }

  void Apply(int32_t position, float* row) const {
    for (int d = 0; d < D / 2; ++d) {
      const double angle = double(position) * frequency_[d];
      cos_[d] = float(std::cos(angle));
      sin_[d] = float(std::sin(angle));
    }
    for (int d = 0; d < D / 2; ++d) {
      const float x = row[d], y = row[d + D / 2];
      row[d] = x * cos_[d] - y * sin_[d];
      row[d + D / 2] = y * cos_[d] + x * sin_[d];
    }
  }

 private:
  cpu::Scratch frequency_, cos_, sin_;
};

}  // namespace attention
}  // namespace flashinfer
