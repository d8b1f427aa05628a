// SPDX-License-Identifier: Apache-2.0
// Stores of a warpgroup's results: fp32 accumulators are rounded to 16 bits, staged in swizzled shared memory and
// written to global memory. TMA stores whole boxes. A box that ends early, because another group's rows follow, uses
// ordinary stores.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../hopper/smem_tile.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/tma.cuh"
#include "params_sm90.cuh"

namespace flashinfer {
namespace gemm {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t PackPair(float x, float y, bool is_half) {
  if (is_half) {
    const __half2 pair = __floats2half2_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

/// Synchronise one consumer warpgroup.
__device__ __forceinline__ void WarpgroupSync(int group) { ptx::BarrierSync(1 + group, WARPGROUP); }

/// Store a staged box of `box_rows` tokens by 64 columns to (column, row) of `batch`. Called by all threads of the
/// warpgroup after the threads have written the box. `rows`: number of tokens of the box to write.
__device__ __forceinline__ void StoreStaged(const GemmParams& p, uint32_t box, int box_rows, int group, int column,
                                            int row, int batch, int rows) {
  const int thread = threadIdx.x % WARPGROUP;
  const bool is_whole = p.tiles.grouping != Grouping::kPacked || rows >= box_rows;
  ptx::FenceAsyncProxy();
  WarpgroupSync(group);
  if (thread == 0) {
    if (is_whole) ptx::StoreBox(&p.out, box, column, row, batch);
    ptx::CommitStores();  // also an empty group: the waits count one group per staging buffer
  }
  if (is_whole) return;
  const int chunk = thread % 8;  // index of a 16-byte chunk in the row
  if (column + 8 * chunk >= p.n) return;
  for (int r = thread / 8; r < rows; r += WARPGROUP / 8) {
    const float4 x = ptx::LoadShared16(box + hopper::Swizzle128(r * hopper::SLAB_ROW_BYTES + chunk * 16));
    *reinterpret_cast<float4*>(p.d + (int64_t(row) + r) * p.d_stride + column + 8 * chunk) = x;
  }
}

/// Store 64 rows of tokens by COLUMNS to (column, row): accumulators with tokens on the M side. `buffers` are two
/// staging buffers of 64 x 128 bytes that alternate; `turn` counts the uses of buffers over all calls.
template <int COLUMNS>
__device__ __forceinline__ void StoreRows(const GemmParams& p, const float (&d)[COLUMNS / 2], float scale,
                                          uint32_t buffers, int& turn, int group, int column, const Tile& tile,
                                          int row) {
  const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
  const int slab_row = 16 * warp + lane % 8 + (lane & 8), chunk = lane / 16;
#pragma unroll
  for (int slab = 0; slab < COLUMNS / 64; ++slab, ++turn) {
    const uint32_t box = buffers + turn % 2 * (64 * hopper::SLAB_ROW_BYTES);
    if (thread == 0) ptx::WaitStoresRead<1>();
    WarpgroupSync(group);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float* x = d + 32 * slab + 4 * j;
      const uint32_t at = box + hopper::Swizzle128(slab_row * hopper::SLAB_ROW_BYTES + (j + chunk) * 16);
      ptx::StoreMatrix4(
          at, PackPair(x[0] * scale, x[1] * scale, p.half_output), PackPair(x[2] * scale, x[3] * scale, p.half_output),
          PackPair(x[4] * scale, x[5] * scale, p.half_output), PackPair(x[6] * scale, x[7] * scale, p.half_output));
    }
    StoreStaged(p, box, 64, group, column + 64 * slab, row, tile.token_batch, tile.end_row - row);
  }
}

/// Store TOKENS rows of tokens by 64 columns: accumulators with weights on the M side, which are transposed while
/// staged. `buffer` has TOKENS x 128 bytes.
template <int TOKENS>
__device__ __forceinline__ void StoreTransposed(const GemmParams& p, const float (&d)[TOKENS / 2], float scale,
                                                uint32_t buffer, int group, int column, const Tile& tile) {
  const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
  const int chunk = 2 * warp + lane / 8 % 2;
  if (thread == 0) ptx::WaitStoresRead<0>();
  WarpgroupSync(group);
  if constexpr (TOKENS == 8) {
    const uint32_t at = buffer + hopper::Swizzle128(lane % 8 * hopper::SLAB_ROW_BYTES + chunk * 16);
    ptx::StoreMatrix2Transposed(at, PackPair(d[0] * scale, d[1] * scale, p.half_output),
                                PackPair(d[2] * scale, d[3] * scale, p.half_output));
  } else {
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j += 2) {
      const float* x = d + 4 * j;
      const int token = 8 * (j + lane / 16) + lane % 8;
      const uint32_t at = buffer + hopper::Swizzle128(token * hopper::SLAB_ROW_BYTES + chunk * 16);
      ptx::StoreMatrix4Transposed(
          at, PackPair(x[0] * scale, x[1] * scale, p.half_output), PackPair(x[2] * scale, x[3] * scale, p.half_output),
          PackPair(x[4] * scale, x[5] * scale, p.half_output), PackPair(x[6] * scale, x[7] * scale, p.half_output));
    }
  }
  StoreStaged(p, buffer, TOKENS, group, column, tile.row, tile.token_batch, tile.end_row - tile.row);
}

/// Return the product of the per-tensor scales in device memory; a missing scale is 1.
__device__ __forceinline__ float TensorScale(const GemmParams& p) {
  const float a = p.token_scale.data == nullptr ? 1.f : *p.token_scale.data;
  return p.weight_scale.data == nullptr ? a : a * *p.weight_scale.data;
}

#endif

}  // namespace gemm
}  // namespace flashinfer
