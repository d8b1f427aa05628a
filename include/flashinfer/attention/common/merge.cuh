// SPDX-License-Identifier: Apache-2.0
// Merge of the partial states of split tiles, one warp per row. The loads of 16 parts are in flight before their
// weights are known: they come from L2, and a row may have a hundred parts. The block that finishes the last part of a
// tile merges it (decode/kernel.cuh), or a separate kernel runs afterwards.
//   test  pytest tests/attention      bench  python benchmarks/bench_decode.py
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

/// Partial state of a row.
struct Part {
  const float *o, *lse;
};

/// Add a weighted part.
template <int VECTORS>
__device__ __forceinline__ void AddPart(float (&sum)[VECTORS][4], float weight, const float4 (&part)[VECTORS]) {
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    sum[v][0] += weight * part[v].x;
    sum[v][1] += weight * part[v].y;
    sum[v][2] += weight * part[v].z;
    sum[v][3] += weight * part[v].w;
  }
}

/// Write the result of a row from the weighted sum of its parts.
template <typename Variant, typename Params, int VECTORS>
__device__ __forceinline__ void Write(const Params& p, const float (&sum)[VECTORS][4], float maximum, float total,
                                      int64_t n, int head) {
  constexpr int D = Params::HEAD_DIM_VO;
  const int lane = threadIdx.x % 32;
  const float factor = (!Variant::use_softmax ? 1.f : (total > 0.f ? ptx::Reciprocal(total) : 0.f)) * p.out_scale;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int column = (v * 32 + lane) * 4;
    if (column >= D) break;
    RoundTo<typename Params::DTypeO, 4>(
        {sum[v][0] * factor, sum[v][1] * factor, sum[v][2] * factor, sum[v][3] * factor})
        .Store(p.o + n * p.o_stride_n + head * p.o_stride_h + column);
  }
  if (lane == 0 && p.lse != nullptr) {
    const float lse = !Variant::use_softmax ? 0.f : (total > 0.f ? maximum + __log2f(total) : -math::inf);
    p.lse[n * p.num_qo_heads + head] = lse * p.lse_scale;
  }
}

/// Weighted sum of the parts of a row, relative to a maximum: VECTORS vectors of 4 of its D columns per lane.
template <int D>
struct RowSum {
  static constexpr int VECTORS = (D + 127) / 128;
  float maximum = -math::inf, total = 0.f, sum[VECTORS][4] = {};
};

/// Add parts part_of(i), i < count, in order. Run by one warp.
template <typename Variant, int D, typename PartOf>
__device__ __forceinline__ void AddParts(RowSum<D>& row, int count, const PartOf& part_of) {
  constexpr int VECTORS = RowSum<D>::VECTORS, IN_FLIGHT = VECTORS <= 1 ? 16 : (VECTORS <= 2 ? 8 : 4);
  const int lane = threadIdx.x % 32;
  float &maximum = row.maximum, &total = row.total;
  auto& sum = row.sum;
#pragma unroll 1
  for (int begin = 0; begin < count; begin += 32) {
    const float lse = begin + lane < count ? __ldcg(part_of(begin + lane).lse) : -math::inf;
    float weight = 0.f;
#pragma unroll 1
    for (int i = 0; i < min(32, count - begin); i += IN_FLIGHT) {
      float4 x[IN_FLIGHT][VECTORS];
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j) {
        const float* from = part_of(min(begin + i + j, count - 1)).o;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
          const int column = (v * 32 + lane) * 4;
          x[j][v] =
              column < D && begin + i + j < count ? __ldcg(reinterpret_cast<const float4*>(from + column)) : float4{};
        }
      }
      if (i == 0) {
        const float next = fmaxf(maximum, WarpMax(lse)), base = next == -math::inf ? 0.f : next;
        const float scale = Variant::use_softmax ? ptx::Exp2(maximum - base) : 1.f;
        weight = Variant::use_softmax ? ptx::Exp2(lse - base) : (begin + lane < count ? 1.f : 0.f);
        maximum = next;
        total = total * scale + GroupSum(weight, 32);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[v][k] *= scale;
        }
      }
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j) {
        AddPart(sum, __shfl_sync(0xffffffffu, weight, i + j), x[j]);  // 0 beyond the last part
      }
    }
  }
}

/// Merge row n of head `head` from parts part_of(i), i < count, in order. Run by one warp.
template <typename Variant, typename Params, typename PartOf>
__device__ __forceinline__ void MergeRow(const Params& p, int count, const PartOf& part_of, int64_t n, int head) {
  RowSum<Params::HEAD_DIM_VO> row;
  AddParts<Variant>(row, count, part_of);
  Write<Variant>(p, row.sum, row.maximum, row.total, n, head);
}

/// Merge row `row` of a tile; run by one warp.
template <int TILE, typename Variant, typename Params>
__device__ __forceinline__ void MergeTileRow(const Params& p, const WorkList& work, const MergeItem& item, int kv_head,
                                             int first_slot, int row) {
  const int64_t first = int64_t(first_slot) * TILE + row, step = int64_t(item.step) * TILE;
  const int group = p.group.divisor, token = p.group.Divide(item.row_begin + row);
  auto part_of = [&](int i) {
    const int64_t at = first + i * step;
    return Part{work.partial_o + at * Params::HEAD_DIM_VO, work.partial_lse + at};
  };
  MergeRow<Variant>(p, item.count, part_of, int64_t(item.qo_begin) + token,
                    kv_head * group + item.row_begin + row - token * group);
}

/// Load merge item `index` of a list, with its head and first slot.
template <int TILE, typename Params>
__device__ __forceinline__ MergeItem MergeAt(const Params& p, const WorkList& work, int index) {
  MergeItem item;
  if (work.items == nullptr) {
    const int tile = p.kv_heads.Divide(index);
    item.kv_head = index - tile * p.num_kv_heads;
    item.qo_begin = 0;
    item.qo_len = p.qo_len;
    item.row_begin = tile * TILE;
    item.count = work.single_request.chunks;
    item.step = p.num_kv_heads;
    item.first_slot = tile * item.count * item.step + item.kv_head;
    return item;
  }
  const int unit = p.kv_heads.Divide(index);
  item = work.merges[unit];
  item.kv_head = index - unit * p.num_kv_heads;
  item.first_slot += item.kv_head;
  return item;
}

template <typename Params, typename Variant, int TILE>
__global__ void __launch_bounds__(THREADS)
    MergeKernel(const __grid_constant__ Params p, const __grid_constant__ WorkList work) {
  ptx::GridDependencyWait();
  constexpr int BLOCKS = TILE / WARPS;  // blocks per tile
  const int row = int(blockIdx.x % BLOCKS * WARPS + threadIdx.x / 32);
  const int index = int(blockIdx.x) / BLOCKS;
  if (work.items != nullptr && p.kv_heads.Divide(index) >= *work.num_merges) return;
  const MergeItem item = MergeAt<TILE>(p, work, index);
  if (item.row_begin + row >= item.qo_len * int(p.group.divisor)) return;
  MergeTileRow<TILE, Variant>(p, work, item, item.kv_head, item.first_slot, row);
}

/// Slots of the parts of a tile of the decode list: `count` slots, num_kv_heads apart.
struct Parts {
  int32_t first_slot, count;
};

/// Slots of the parts of the tile of `part`. IS_COMPUTED: `part` was computed (ComputedItem).
template <bool IS_COMPUTED, bool CAN_BE_SINGLE, typename Params>
__device__ __forceinline__ Parts PartsOf(const Params& p, const WorkList& work, const WorkItem& part) {
  const int heads = p.num_kv_heads;
  if constexpr (IS_COMPUTED) {
    if (!CAN_BE_SINGLE || work.items != nullptr) {
      const int count = work.equal_requests.chunks.divisor;
      return {part.merge * count * heads + part.kv_head, count};
    }
  }
  const MergeItem item = MergeAt<DECODE_TILE>(p, work, part.merge * heads + part.kv_head);
  return {item.first_slot, item.count};
}

/// Merge row `n` of head `head` from `count` parts at o and lse, `step` rows apart, by one warp. As MergeRow, but parts
/// pass through `room` bytes of shared memory at `buffer`. That is a third of the code, which matters because a block
/// that ran for only a few microseconds has to fetch it from memory.
template <typename Variant, typename Params>
__device__ __forceinline__ void MergeThrough(const Params& p, const float* o, const float* lse, int count, int64_t step,
                                             int64_t n, int head, uint32_t buffer, int room) {
  constexpr int D = Params::HEAD_DIM_VO, VECTORS = (D + 127) / 128, LINE = D * int(sizeof(float)), UNROLLED = 4;
  const int lane = threadIdx.x % 32;
  float maximum = -math::inf, total = 0.f, sum[VECTORS][4] = {};
  buffer += lane * 16;
  o += lane * 4;
#pragma unroll 1
  for (int begin = 0; begin < count; begin += 32) {
    const int end = min(count, begin + 32);
    const float score = begin + lane < count ? __ldcg(lse + (begin + lane) * step) : -math::inf;
    float weight = 0.f;
#pragma unroll 1
    for (int i = begin; i < end;) {
      const int first = i, last = min(end, i + room / LINE / UNROLLED * UNROLLED);
      uint32_t to = buffer;
#pragma unroll 1
      for (; i < last; i += UNROLLED, to += UNROLLED * LINE) {
#pragma unroll
        for (int j = 0; j < UNROLLED; ++j, o += step * D) {
#pragma unroll
          for (int v = 0; v < VECTORS; ++v) {
            if ((v * 32 + lane) * 4 < D && i + j < last) ptx::CopyAsync16(to + j * LINE + v * 512, o + v * 128, true);
          }
        }
      }
      i = last;
      ptx::CopyCommit();
      if (first == begin) {
        const float next = fmaxf(maximum, WarpMax(score)), base = next == -math::inf ? 0.f : next;
        const float scale = Variant::use_softmax ? ptx::Exp2(maximum - base) : 1.f;
        weight = Variant::use_softmax ? ptx::Exp2(score - base) : (begin + lane < count ? 1.f : 0.f);
        maximum = next;
        total = total * scale + GroupSum(weight, 32);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[v][k] *= scale;
        }
      }
      ptx::CopyWait<0>();
      uint32_t from = buffer;
#pragma unroll 1
      for (int at = first; at < last; at += UNROLLED, from += UNROLLED * LINE) {
#pragma unroll
        for (int j = 0; j < UNROLLED; ++j) {
          const float w = __shfl_sync(0xffffffffu, weight, at + j);
#pragma unroll
          for (int v = 0; v < VECTORS; ++v) {
            if ((v * 32 + lane) * 4 >= D || at + j >= last) break;
            const float4 x = ptx::LoadShared16(from + j * LINE + v * 512);
            sum[v][0] += w * x.x;
            sum[v][1] += w * x.y;
            sum[v][2] += w * x.z;
            sum[v][3] += w * x.w;
          }
        }
      }
    }
  }
  Write<Variant>(p, sum, maximum, total, n, head);
}

/// Report that a part of a tile of the decode list is done; the block that reports the last part merges the tile.
/// Called by all threads of a block after a barrier; `others` is memory for one number, `buffer` is `room` bytes per
/// warp.
template <typename Params, typename Variant, typename Team>
__device__ __forceinline__ void Arrive(const Params& p, const WorkList& work, const WorkItem& part, const Parts& parts,
                                       int* others, uint32_t buffer, int room) {
  int* const arrivals = work.arrivals + part.merge * p.num_kv_heads + part.kv_head;
  if (Team::Index() == 0) *others = ptx::AddOrdered(arrivals, 1);
  Team::Sync();
  if (*others + 1 != parts.count) return;
  if (Team::Index() == 0) *arrivals = 0;
  const int group = p.group.divisor, rows = min(DECODE_TILE, part.qo_len * group - part.row_begin);
  const int first = parts.first_slot * DECODE_TILE, step = p.num_kv_heads * DECODE_TILE;
#pragma unroll 1
  for (int row = Team::Warp(); row < rows; row += WARPS) {
    const int token = p.group.Divide(part.row_begin + row);
    MergeThrough<Variant>(p, work.partial_o + int64_t(first + row) * Params::HEAD_DIM_VO,
                          work.partial_lse + first + row, parts.count, step, int64_t(part.qo_begin) + token,
                          part.kv_head * group + part.row_begin + row - token * group, buffer, room);
  }
}

/// Merge the parts of a tile that the blocks of a cluster hold in shared memory: rows 4 i to 4 i + 3 of a part at part
/// + i * quad_bytes, their log-sum-exps at `scores`. Bit-identical to the merge through global memory. Called by all
/// threads of the cluster.
template <typename Params, typename Variant>
__device__ __forceinline__ void MergeInCluster(const Params& p, const WorkItem& item, uint32_t part, int quad_bytes,
                                               uint32_t scores) {
  constexpr int D = Params::HEAD_DIM_VO, VECTORS = (D + 127) / 128;
  const int lane = threadIdx.x % 32, count = ptx::ClusterSize(), group = p.group.divisor;
  const int rows = min(DECODE_TILE, item.qo_len * group - item.row_begin);
  ptx::ClusterSync();
#pragma unroll 1
  for (int row = ptx::ClusterRank() + count * (threadIdx.x / 32); row < rows; row += count * WARPS) {
    const float score = lane < count ? ptx::LoadShared4(scores + row * 4, lane) : -math::inf;
    const uint32_t from = part + row / 4 * quad_bytes + row % 4 * (D * 4) + lane * 16;
    float4 x[MAX_CLUSTER][VECTORS];
#pragma unroll
    for (int i = 0; i < MAX_CLUSTER; ++i) {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        x[i][v] = (v * 32 + lane) * 4 < D && i < count ? ptx::LoadShared16(from + v * 512, i) : float4{};
      }
    }
    const float maximum = WarpMax(score), base = maximum == -math::inf ? 0.f : maximum;
    const float weight = Variant::use_softmax ? ptx::Exp2(score - base) : (lane < count ? 1.f : 0.f);
    const float total = GroupSum(weight, 32);
    float sum[VECTORS][4] = {};
#pragma unroll
    for (int i = 0; i < MAX_CLUSTER; ++i) {
      AddPart(sum, __shfl_sync(0xffffffffu, weight, i), x[i]);  // 0 beyond the last part
    }
    const int token = p.group.Divide(item.row_begin + row);
    Write<Variant>(p, sum, maximum, total, int64_t(item.qo_begin) + token,
                   item.kv_head * group + item.row_begin + row - token * group);
  }
  ptx::ClusterArriveRelaxed();  // a block must not exit while others read its shared memory
  ptx::ClusterWait();
}

}  // namespace merge

template <typename Params, int TILE>
Status LaunchMerge(const Params& params, const WorkList& work, bool enable_pdl, Stream stream) {
  if (work.merge_blocks == 0 || work.arrivals != nullptr) return cudaSuccess;
  return Launch(merge::MergeKernel<Params, Variant<false>, TILE>, dim3(work.merge_blocks * (TILE / merge::WARPS)),
                dim3(merge::THREADS), enable_pdl, stream, params, work);
}

}  // namespace attention
}  // namespace flashinfer
