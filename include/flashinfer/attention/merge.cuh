// SPDX-License-Identifier: Apache-2.0
// Merging the partial states of split tiles, in the order of their keys. One warp per row; the weights of 32 parts at a
// time are computed by its lanes, then the parts are streamed with several loads under way.
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

template <typename Params, typename Variant, int TILE>
__global__ void __launch_bounds__(THREADS)
    MergeKernel(const __grid_constant__ Params p, const __grid_constant__ WorkList work) {
  constexpr int D = Params::HEAD_DIM_VO, VECTORS = (D + 127) / 128;  // of 4 floats, per lane
  // Parts whose loads are issued before the first is used: with 4, merging 33 parts took 17 us, latency after latency.
  constexpr int IN_FLIGHT = 16 / VECTORS;
  ptx::GridDependencyWait();
  const int lane = threadIdx.x % 32, group = p.group.divisor;
  const int row = (blockIdx.x % (TILE / WARPS)) * WARPS + threadIdx.x / 32, index = blockIdx.x / (TILE / WARPS);
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
  } else {
    const bool per_head = work.block_indptr == nullptr;
    const int unit = per_head ? index / p.num_kv_heads : index;
    if (unit >= *work.num_merges) return;
    item = work.merges[unit];
    if (per_head) {
      item.kv_head = index - unit * p.num_kv_heads;
      item.first_slot += item.kv_head;
    }
  }
  if (item.row_begin + row >= item.qo_len * group) return;
  const int64_t first = int64_t(item.first_slot) * TILE + row, step = int64_t(item.step) * TILE;
  float maximum = -math::inf, total = 0.f, sum[VECTORS][4] = {};
  for (int begin = 0; begin < item.count; begin += 32) {
    const int parts = min(32, item.count - begin);
    const float score = lane < parts ? work.partial_lse[first + (begin + lane) * step] : -math::inf;
    float weight = 1.f;
    if constexpr (Variant::use_softmax) {
      const float next = fmaxf(maximum, WarpMax(score)), base = next == -math::inf ? 0.f : next;
      const float scale = ptx::Exp2(maximum - base);
      weight = ptx::Exp2(score - base);
      total = total * scale + GroupSum(weight, 32);
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[v][j] *= scale;
      }
      maximum = next;
    }
    for (int part = 0; part < parts; part += IN_FLIGHT) {
      float4 x[IN_FLIGHT][VECTORS];
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const float* from = work.partial_o + (first + (begin + min(part + i, parts - 1)) * step) * D;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
          const int column = (v * 32 + lane) * 4;
          x[i][v] = column < D ? *reinterpret_cast<const float4*>(from + column) : float4{};
        }
      }
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const float w = __shfl_sync(0xffffffffu, weight, (part + i) % 32);
        if (part + i >= parts) break;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
          sum[v][0] += w * x[i][v].x;
          sum[v][1] += w * x[i][v].y;
          sum[v][2] += w * x[i][v].z;
          sum[v][3] += w * x[i][v].w;
        }
      }
    }
  }
  const float factor = (!Variant::use_softmax ? 1.f : (total > 0.f ? ptx::Reciprocal(total) : 0.f)) * p.out_scale;
  const int token = p.group.Divide(item.row_begin + row),
            head = item.kv_head * group + item.row_begin + row - token * group;
  const int64_t n = int64_t(item.qo_begin) + token;
  typename Params::DTypeO* to = p.o + n * p.o_stride_n + head * p.o_stride_h;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = (v * 32 + lane) * 4;
    if (column >= D) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) to[column + j] = FromFloat<typename Params::DTypeO>(sum[v][j] * factor);
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
  return Launch(merge::MergeKernel<Params, Variant<false>, TILE>, dim3(work.merge_blocks * (TILE / merge::WARPS)),
                dim3(merge::THREADS), enable_pdl, stream, params, work);
}

}  // namespace attention
}  // namespace flashinfer
