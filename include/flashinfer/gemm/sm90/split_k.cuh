// SPDX-License-Identifier: Apache-2.0
// Split-K of tiles with tokens on the M side: the blocks of a cluster sum parts of K of one tile. Each leaves the sums that
// others finish in its ring, which is free then, and finishes a part of the columns: it reads accumulators of others in their
// shared memory, and adds in the order of the ranks, so that results do not depend on timing. A cluster has one tile.
#pragma once
#include "../../ptx/barrier.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/cp_async.cuh"
#include "epilogue.cuh"

namespace flashinfer {
namespace gemm {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Return the first K block that block `rank` of a cluster sums, which is the end of the part of the block before.
__device__ __forceinline__ int FirstBlock(const GemmParams& p, int rank) { return p.k_blocks * rank / p.split; }

/// Return the first K block that this block sums, and their number. SPLITS: that of the kernel; others sum all.
template <bool SPLITS>
__device__ __forceinline__ int FirstBlock(const GemmParams& p) {
  return SPLITS ? FirstBlock(p, int(ptx::ClusterRank())) : 0;
}
template <bool SPLITS>
__device__ __forceinline__ int BlockCount(const GemmParams& p) {
  return SPLITS ? FirstBlock(p, int(ptx::ClusterRank()) + 1) - FirstBlock<true>(p) : p.k_blocks;
}

/// Return the number of blocks of a cluster.
template <bool SPLITS>
__device__ __forceinline__ int ClusterBlocks(const GemmParams& p) {
  return SPLITS ? p.split : p.cluster;
}

/// Let the other blocks of the cluster read what the consumers have written. All threads of the cluster call it, in different
/// places of the code.
__device__ __forceinline__ void ClusterBarrier() {
  __syncwarp();
  ptx::ClusterArriveApart();
  ptx::ClusterWaitApart();
}

/// Wait until both warpgroups have read the ring.
__device__ __forceinline__ void MeetConsumers() {
  __syncwarp();
  ptx::BarrierSyncApart(1, CONSUMERS * WARPGROUP);
}

/// Add the accumulators of all blocks for 64 rows by COLUMNS columns, and store those of this block. `ring`: address of
/// memory that no stage uses any more. Called by all consumer threads of the cluster whose warpgroup has rows.
template <int SPLIT, int COLUMNS>
__device__ __forceinline__ void StoreSplitSums(const GemmParams& p, float (&d)[COLUMNS / 2], uint32_t ring,
                                               uint32_t staging, int column, const Tile& tile, int row) {
  constexpr int OWN = COLUMNS / 2 / SPLIT;  // registers of the columns that a block finishes
  static_assert(COLUMNS % (16 * SPLIT) == 0, "columns of a block");
  const int rank = int(ptx::ClusterRank());
  const uint32_t mine = ring + (threadIdx.x - WARPGROUP) * 16;
  const auto place = [&](int i) { return mine + i / 4 * (CONSUMERS * WARPGROUP * 16); };
  MeetConsumers();
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i += 4) {
    if (i / OWN == rank) continue;
    ptx::StoreShared16(place(i), {__float_as_uint(d[i]), __float_as_uint(d[i + 1]), __float_as_uint(d[i + 2]),
                                  __float_as_uint(d[i + 3])});
  }
  ClusterBarrier();
#pragma unroll
  for (int owner = 0; owner < SPLIT; ++owner) {
    if (owner != rank) continue;
    float (&sums)[OWN] = reinterpret_cast<float (&)[OWN]>(d[owner * OWN]);
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
      float4 parts[SPLIT];
#pragma unroll
      for (int from = 0; from < SPLIT; ++from) {
        parts[from] = {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
        if (from != owner) parts[from] = ptx::LoadShared16(place(owner * OWN + i), uint32_t(from));
      }
      float4 sum = parts[0];
#pragma unroll
      for (int from = 1; from < SPLIT; ++from) {
        sum.x += parts[from].x, sum.y += parts[from].y, sum.z += parts[from].z, sum.w += parts[from].w;
      }
      sums[i] = sum.x, sums[i + 1] = sum.y, sums[i + 2] = sum.z, sums[i + 3] = sum.w;
    }
    StoreColumns<2 * OWN>(p, sums, 1.f, staging, column + owner * 2 * OWN, tile, row);
  }
}

/// Take part in the exchange of a warpgroup that has no rows.
__device__ __forceinline__ void SkipSplitSums() {
  MeetConsumers();
  ClusterBarrier();
}

#endif

}  // namespace gemm
}  // namespace flashinfer
