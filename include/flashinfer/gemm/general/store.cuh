// SPDX-License-Identifier: Apache-2.0
// Results of the general GEMM kernel: accumulators in shared memory are scaled, added to bias and old results, and rounded.
#pragma once
#include "../../vec_dtypes.cuh"
#include "work.cuh"

namespace flashinfer {
namespace gemm {

/// Load or store an element of a type that is known at run time: fp32, fp16 or bf16.
__device__ __forceinline__ float LoadElement(const void* from, Element element, int64_t at) {
  if (element == Element::kFloat32) return static_cast<const float*>(from)[at];
  if (element == Element::kFloat16) return ToFloat(static_cast<const __half*>(from)[at]);
  return ToFloat(static_cast<const __nv_bfloat16*>(from)[at]);
}
__device__ __forceinline__ void StoreElement(void* to, Element element, int64_t at, float x) {
  if (element == Element::kFloat32) {
    static_cast<float*>(to)[at] = x;
  } else if (element == Element::kFloat16) {
    static_cast<__half*>(to)[at] = FromFloat<__half>(x);
  } else {
    static_cast<__nv_bfloat16*>(to)[at] = FromFloat<__nv_bfloat16>(x);
  }
}

/// Store 8 neighbours, aligned to 16 bytes.
__device__ __forceinline__ void StoreElements(void* to, Element element, int64_t at, const float (&x)[8]) {
  if (element == Element::kFloat32) {
    float4* vectors = reinterpret_cast<float4*>(static_cast<float*>(to) + at);
    vectors[0] = make_float4(x[0], x[1], x[2], x[3]);
    vectors[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else if (element == Element::kFloat16) {
    RoundTo<__half>(x).Store(static_cast<__half*>(to) + at);
  } else {
    RoundTo<__nv_bfloat16>(x).Store(static_cast<__nv_bfloat16*>(to) + at);
  }
}

/// Compute factor * sum + beta * d + bias for 8 columns of a row, and store them. `sums` are those of the first part.
template <class Tile>
__device__ __forceinline__ void StoreColumns(const GemmPlan& p, const float* sums, float factor, int64_t row_at,
                                             int column) {
  float x[8] = {};
#pragma unroll
  for (int part = 0; part < Tile::PARTS; ++part) {  // in this order: results do not depend on timing
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const auto four = Vec<float, 4>::Load(sums + part * Tile::BLOCK_M * Tile::SUMS_STRIDE + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i + j] += four[j];
    }
  }
  const Matrix& d = p.x.d;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] *= factor;
    if (column + i >= p.n) continue;
    if (p.x.beta != 0.f) x[i] += p.x.beta * LoadElement(d.data, d.element, row_at + (column + i) * d.column_stride);
    if (p.x.bias != nullptr) x[i] += LoadElement(p.x.bias, p.x.bias_element, column + i);
  }
  if (p.d_chunks && column + 8 <= p.n) {
    StoreElements(d.data, d.element, row_at + column, x);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (column + i < p.n) StoreElement(d.data, d.element, row_at + (column + i) * d.column_stride, x[i]);
    }
  }
}

/// Store the results of a tile from its accumulators in shared memory.
template <class Tile>
__device__ __forceinline__ void StoreTile(const GemmPlan& p, const WorkTile& tile, const float* sums, float factor) {
  constexpr int GROUPS = Tile::BLOCK_N / 8;
  for (int i = threadIdx.x; i < Tile::BLOCK_M * GROUPS; i += Tile::THREADS) {
    const int row = p.d_by_rows ? i % Tile::BLOCK_M : i / GROUPS;
    const int column = (p.d_by_rows ? i / Tile::BLOCK_M : i % GROUPS) * 8;
    if (row >= tile.rows || tile.column + column >= p.n) continue;
    if (p.x.grouping == Grouping::kContiguous && p.x.groups[tile.row + row] < 0) continue;
    const int64_t row_at = tile.token_batch * p.x.d.batch_stride + (tile.row + row) * p.x.d.row_stride;
    StoreColumns<Tile>(p, sums + row * Tile::SUMS_STRIDE + column, factor, row_at, tile.column + column);
  }
}

}  // namespace gemm
}  // namespace flashinfer
