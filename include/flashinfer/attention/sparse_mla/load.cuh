// SPDX-License-Identifier: Apache-2.0
// Queries and rows of the cache on their way to shared memory, as numbers of T (kernel.cuh). Eight lanes take a row, 16 bytes
// each: rows lie anywhere, and 128 bytes of one are a line. Numbers like the queries' arrive by cp.async; those of 8 bits pass
// through registers, where they are converted.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../../ptx/cp_async.cuh"
#include "../../ptx/shared.cuh"
#include "../../utils.cuh"
#include "../common/convert.cuh"
#include "params.h"

namespace flashinfer {
namespace sparse_mla {

constexpr int ROW_LANES = 8;

/// Address of a row of the cache, or null if index `j` of a token names none.
__device__ __forceinline__ const char* RowOf(const SparseMlaParams& p, const int32_t* indices, int j, int end) {
  const int32_t row = j < end ? indices[j] : -1;
  if (row < 0 || row >= p.rows) return nullptr;
  const uint32_t page = p.page_size.Divide(uint32_t(row)), slot = uint32_t(row) - page * p.page_size.divisor;
  return static_cast<const char*>(p.kv) + page * p.kv_stride_page + slot * p.kv_stride_slot;
}

/// Convert 16 e4m3 numbers times a scale to bf16, and store them.
template <bool SCALED>
__device__ __forceinline__ void StoreConverted(uint32_t to, const uint4& from, float scale) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
  uint32_t out[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t even, odd;  // numbers 0 and 2, 1 and 3
    attention::ExpandFp8<__nv_bfloat16, __nv_fp8_e4m3>(words[i], even, odd);
    if constexpr (SCALED) {
      const float2 a = attention::Unpack<__nv_bfloat16>(even), b = attention::Unpack<__nv_bfloat16>(odd);
      out[2 * i] = attention::Pack<__nv_bfloat16>(a.x * scale, b.x * scale);
      out[2 * i + 1] = attention::Pack<__nv_bfloat16>(a.y * scale, b.y * scale);
    } else {
      out[2 * i] = __byte_perm(even, odd, 0x5410);
      out[2 * i + 1] = __byte_perm(even, odd, 0x7632);
    }
  }
  ptx::StoreShared16(to, uint4{out[0], out[1], out[2], out[3]});
  ptx::StoreShared16(to + 16, uint4{out[4], out[5], out[6], out[7]});
}

/// Copy the part of lane `lane` of eight of a row of the cache; zeros if it does not exist.
template <Cache CACHE, int D>
__device__ __forceinline__ void CopyRow(uint32_t to, const char* from, int lane) {
  const bool exists = from != nullptr;
  if constexpr (CACHE == Cache::kLikeQuery) {
#pragma unroll
    for (int i = 0; i < D / 8 / ROW_LANES; ++i) {
      const int at = (i * ROW_LANES + lane) * 16;
      ptx::CopyAsync16(to + at, exists ? from + at : nullptr, exists);
    }
  } else {
    constexpr int NUMBERS = CACHE == Cache::kPacked ? D_V : D, STEPS = (NUMBERS / 16 + ROW_LANES - 1) / ROW_LANES;
    uint4 x[STEPS], rope = {0u, 0u, 0u, 0u};
    float4 scales = {1.f, 1.f, 1.f, 1.f};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int chunk = i * ROW_LANES + lane;
      x[i] = uint4{0u, 0u, 0u, 0u};
      if (exists && chunk * 16 < NUMBERS) x[i] = *reinterpret_cast<const uint4*>(from + chunk * 16);
    }
    if constexpr (CACHE == Cache::kPacked) {
      if (exists) scales = *reinterpret_cast<const float4*>(from + D_V);
      if (exists) rope = *reinterpret_cast<const uint4*>(from + D_V + 16 + lane * 16);
      ptx::StoreShared16(to + (D_V + lane * 8) * 2, rope);
    }
    const float scale_of[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int chunk = i * ROW_LANES + lane;  // eight chunks have one scale
      if (chunk * 16 < NUMBERS) StoreConverted<CACHE == Cache::kPacked>(to + chunk * 32, x[i], scale_of[i % 4]);
    }
  }
}

/// Copy heads [first, first + ROWS) of a token to rows of PITCH bytes; zeros behind the last head.
template <typename T, int ROWS, int D, int PITCH, int THREADS>
__device__ __forceinline__ void CopyQueries(const SparseMlaParams& p, uint32_t to, int64_t token, int first) {
  constexpr int CHUNKS = D / 8;
  const T* q = static_cast<const T*>(p.q) + token * p.q_stride_n;
  const bool is_aligned = reinterpret_cast<uintptr_t>(p.q) % 16 == 0 && p.q_stride_n % 8 == 0 && p.q_stride_h % 8 == 0;
  for (int i = int(threadIdx.x); i < ROWS * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const bool exists = first + row < p.heads;
    const T* from = q + (exists ? first + row : 0) * p.q_stride_h + chunk * 8;
    uint4 x = {0u, 0u, 0u, 0u};
    if (exists && is_aligned) {
      x = *reinterpret_cast<const uint4*>(from);
    } else if (exists) {
      const auto* bits = reinterpret_cast<const uint16_t*>(from);
      x.x = bits[0] | uint32_t(bits[1]) << 16, x.y = bits[2] | uint32_t(bits[3]) << 16;
      x.z = bits[4] | uint32_t(bits[5]) << 16, x.w = bits[6] | uint32_t(bits[7]) << 16;
    }
    ptx::StoreShared16(to + row * PITCH + chunk * 16, x);
  }
}

}  // namespace sparse_mla
}  // namespace flashinfer
