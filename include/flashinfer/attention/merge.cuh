// SPDX-License-Identifier: Apache-2.0
// Merging the partial states of split tiles. One block per row: each warp adds every fourth part, then the warps' sums are
// added in their order. The loads of 32 parts are under way before their weights are known; one warp that took them
// four at a time needed 10 us for the 33 parts of a long request.
//   test  pytest tests/attention
#pragma once
#include "tile.cuh"

namespace flashinfer {
namespace attention {
namespace merge {

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;

__device__ __forceinline__ float WarpMax(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}

/// Parts that one row is merged from.
struct Parts {
  int64_t first, step;  // rows of the partial buffers
  int count;
};

/// The sum of a warp's parts.
template <typename Params, typename Variant>
struct Sum {
  static constexpr int D = Params::HEAD_DIM_VO, VECTORS = (D + 127) / 128;  // of 4 floats, per lane
  static constexpr int IN_FLIGHT = 8 / (VECTORS > 2 ? 2 : 1);
  static constexpr int BATCH = IN_FLIGHT * WARPS;  // parts whose loads a block has under way
  float4 x[IN_FLIGHT][VECTORS];
  float sum[VECTORS][4] = {};

  /// Ask for the warp's parts among [begin, begin + BATCH).
  __device__ __forceinline__ void Load(const WorkList& work, const Parts& parts, int begin) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int part = min(begin + i * WARPS + warp, parts.count - 1);
      const float* from = work.partial_o + (parts.first + part * parts.step) * D;
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        const int column = (v * 32 + lane) * 4;
        x[i][v] = column < D ? *reinterpret_cast<const float4*>(from + column) : float4{};
      }
    }
  }
  __device__ __forceinline__ void Add(const WorkList& work, const Parts& parts, int begin, float base) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int part = begin + i * WARPS + warp;
      if (part >= parts.count) break;
      const float weight =
          Variant::use_softmax ? ptx::Exp2(work.partial_lse[parts.first + part * parts.step] - base) : 1.f;
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        sum[v][0] += weight * x[i][v].x;
        sum[v][1] += weight * x[i][v].y;
        sum[v][2] += weight * x[i][v].z;
        sum[v][3] += weight * x[i][v].w;
      }
    }
  }
};

/// The merge item of a block, for its head.
template <int TILE, typename Params>
__device__ __forceinline__ MergeItem ItemOfBlock(const Params& p, const WorkList& work, int index) {
  MergeItem item;
  if (work.items == nullptr) {
    const int tile = index / p.num_kv_heads;
    item.kv_head = index - tile * p.num_kv_heads;
    item.qo_begin = 0;
    item.qo_len = p.qo_len;
    item.row_begin = tile * TILE;
    item.count = work.uniform.chunks;
    item.step = p.num_kv_heads;
    item.first_slot = tile * item.count * item.step + item.kv_head;
    return item;
  }
  const bool per_head = work.block_indptr == nullptr;
  const int unit = per_head ? index / p.num_kv_heads : index;
  if (unit >= *work.num_merges) {
    item.row_begin = item.qo_len = 0;  // no rows
    return item;
  }
  item = work.merges[unit];
  if (per_head) {
    item.kv_head = index - unit * p.num_kv_heads;
    item.first_slot += item.kv_head;
  }
  return item;
}

template <typename Params, typename Variant, int TILE>
__global__ void __launch_bounds__(THREADS)
    MergeKernel(const __grid_constant__ Params p, const __grid_constant__ WorkList work) {
  using Sums = Sum<Params, Variant>;
  __shared__ float shared[WARPS - 1][Sums::VECTORS * 128];
  ptx::GridDependencyWait();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = p.group.divisor;
  const int row = blockIdx.x % TILE;
  const MergeItem item = ItemOfBlock<TILE>(p, work, blockIdx.x / TILE);
  if (item.row_begin + row >= item.qo_len * group) return;
  const Parts parts{int64_t(item.first_slot) * TILE + row, int64_t(item.step) * TILE, item.count};
  Sums sums;
  sums.Load(work, parts, 0);
  float maximum = -math::inf, total = 0.f;
  for (int i = lane; i < parts.count; i += 32) maximum = fmaxf(maximum, work.partial_lse[parts.first + i * parts.step]);
  maximum = WarpMax(maximum);
  const float base = maximum == -math::inf ? 0.f : maximum;
  for (int i = lane; i < parts.count; i += 32)
    total += ptx::Exp2(work.partial_lse[parts.first + i * parts.step] - base);
  total = GroupSum(total, 32);
  for (int begin = 0;;) {
    sums.Add(work, parts, begin, base);
    begin += Sums::BATCH;
    if (begin >= parts.count) break;
    sums.Load(work, parts, begin);
  }
  if (warp > 0) {
#pragma unroll
    for (int v = 0; v < Sums::VECTORS; ++v) {
      const float (&x)[4] = sums.sum[v];
      *reinterpret_cast<float4*>(&shared[warp - 1][(v * 32 + lane) * 4]) = make_float4(x[0], x[1], x[2], x[3]);
    }
  }
  __syncthreads();
  if (warp > 0) return;
  const float factor = (!Variant::use_softmax ? 1.f : (total > 0.f ? ptx::Reciprocal(total) : 0.f)) * p.out_scale;
  const int token = p.group.Divide(item.row_begin + row);
  const int head = item.kv_head * group + item.row_begin + row - token * group;
  const int64_t n = int64_t(item.qo_begin) + token;
#pragma unroll
  for (int v = 0; v < Sums::VECTORS; ++v) {
    const int column = (v * 32 + lane) * 4;
    if (column >= Sums::D) break;
    Vec<typename Params::DTypeO, 4> out;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float x = sums.sum[v][j];
#pragma unroll
      for (int w = 0; w < WARPS - 1; ++w) x += shared[w][column + j];
      out[j] = FromFloat<typename Params::DTypeO>(x * factor);
    }
    out.Store(p.o + n * p.o_stride_n + head * p.o_stride_h + column);
  }
  if (lane == 0 && p.lse != nullptr) {
    const float lse = !Variant::use_softmax ? 0.f : (total > 0.f ? maximum + __log2f(total) : -math::inf);
    p.lse[n * p.num_qo_heads + head] = lse * p.lse_scale;
  }
}

}  // namespace merge

template <typename Params, int TILE>
Status LaunchMerge(const Params& params, const WorkList& work, bool enable_pdl, Stream stream) {
  if (work.merge_blocks == 0) return cudaSuccess;
  return Launch(merge::MergeKernel<Params, Variant<false>, TILE>, dim3(work.merge_blocks * TILE), dim3(merge::THREADS),
                enable_pdl, stream, params, work);
}

}  // namespace attention
}  // namespace flashinfer
