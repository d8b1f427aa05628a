// SPDX-License-Identifier: Apache-2.0
// Sums over K of one consumer warpgroup: WAVES times 64 rows (side A of wgmma) by COLUMNS (side B).
#pragma once
#include "../hopper/ring.cuh"
#include "../hopper/smem_tile.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"

namespace flashinfer {
namespace gemm {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Shared-memory descriptors of this warpgroup's operands in stage 0, and the distance between stages in bytes.
struct StageOperands {
  uint64_t a, b;  // wgmma descriptors
  uint32_t stage_bytes;

  __device__ __forceinline__ uint64_t A(int stage) const { return hopper::AdvanceDescriptor(a, stage * stage_bytes); }
  __device__ __forceinline__ uint64_t B(int stage) const { return hopper::AdvanceDescriptor(b, stage * stage_bytes); }
};

/// Issue the four products of a stage for the 64 rows at `a`.
template <ptx::WgmmaType TYPE, int COLUMNS>
__device__ __forceinline__ void StageProducts(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b, bool accumulate) {
#pragma unroll
  for (int k = 0; k < hopper::SLAB_ROW_BYTES / hopper::WGMMA_K_BYTES; ++k) {
    ptx::Wgmma<TYPE, COLUMNS>::Run(d, hopper::AdvanceDescriptor(a, k * hopper::WGMMA_K_BYTES),
                                   hopper::AdvanceDescriptor(b, k * hopper::WGMMA_K_BYTES), accumulate || k > 0);
  }
}

/// Compute acc = the sum over `k_blocks` stages, in the accumulators of the tensor cores. The products of one stage are
/// in flight while the warpgroup waits for the next stage. A stage is released after the products of the next stage are
/// issued. COPIED: cp.async wrote the rows, like ordinary stores, which the tensor cores see after a fence.
template <ptx::WgmmaType TYPE, int WAVES, int COLUMNS, bool COPIED = false, int STAGES>
__device__ __forceinline__ void SumStages(float (&acc)[WAVES][COLUMNS / 2], const hopper::Ring<STAGES>& ring,
                                          hopper::RingPosition<STAGES>& at, const StageOperands& from, int k_blocks,
                                          uint32_t cluster) {
  int previous = 0;
  for (int kb = 0; kb < k_blocks; ++kb) {
    ring.WaitFull(at);
    if constexpr (COPIED) ptx::FenceAsyncProxy();
#pragma unroll
    for (int w = 0; w < WAVES; ++w) ptx::WgmmaPin(acc[w]);
    ptx::WgmmaFence();
#pragma unroll
    for (int w = 0; w < WAVES; ++w) {
      const uint64_t a = hopper::AdvanceDescriptor(from.A(at.stage), w * 64 * hopper::SLAB_ROW_BYTES);
      StageProducts<TYPE, COLUMNS>(acc[w], a, from.B(at.stage), kb > 0);
    }
    ptx::WgmmaCommit();
    ptx::WgmmaWait<1>();
    if (kb > 0) ring.Release(previous, cluster);
    previous = at.stage;
    at.Advance();
  }
  ptx::WgmmaWait<0>();
#pragma unroll
  for (int w = 0; w < WAVES; ++w) ptx::WgmmaPin(acc[w]);
  ring.Release(previous, cluster);
}

/// Let `k_blocks` stages pass: the warpgroup has no rows in the tile, and leaves the tensor cores to the other one.
template <int STAGES>
__device__ __forceinline__ void SkipStages(const hopper::Ring<STAGES>& ring, hopper::RingPosition<STAGES>& at,
                                           int k_blocks, uint32_t cluster) {
  for (int kb = 0; kb < k_blocks; ++kb) {
    ring.WaitFull(at);
    __syncwarp();  // no product keeps the lanes together
    ring.Release(at.stage, cluster);
    at.Advance();
  }
}

/// Compute acc = the sum over stages of products times scales, for the first `waves` waves; the others are zero. The sum
/// is in fp32, because tensor cores keep only some 13 bits of fp8 sums. `scales` reads the scales of a stage from shared
/// memory (Take), and adds scaled products (Add).
template <ptx::WgmmaType TYPE, int WAVES, int COLUMNS, int STAGES, typename Scales>
__device__ __forceinline__ void SumScaledStages(float (&acc)[WAVES][COLUMNS / 2], const hopper::Ring<STAGES>& ring,
                                                hopper::RingPosition<STAGES>& at, const StageOperands& from,
                                                int k_blocks, uint32_t cluster, Scales& scales, int waves = WAVES) {
  float scratch[COLUMNS / 2];
#pragma unroll
  for (int w = 0; w < WAVES; ++w) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) acc[w][i] = 0.f;
  }
  for (int kb = 0; kb < k_blocks; ++kb) {
    ring.WaitFull(at);
    scales.Take(at.stage);
#pragma unroll
    for (int w = 0; w < WAVES; ++w) {
      if (w >= waves) break;
      const uint64_t a = hopper::AdvanceDescriptor(from.A(at.stage), w * 64 * hopper::SLAB_ROW_BYTES);
      ptx::WgmmaPin(scratch);
      ptx::WgmmaFence();
      StageProducts<TYPE, COLUMNS>(scratch, a, from.B(at.stage), false);
      ptx::WgmmaCommit();
      ptx::WgmmaWait<0>();
      ptx::WgmmaPin(scratch);
      // Released before the additions, so that the producer refills the stage meanwhile.
      if (w == waves - 1) {
        __syncwarp();  // all lanes have read the scales
        ring.Release(at.stage, cluster);
      }
      scales.Add(acc[w], scratch, w);
    }
    at.Advance();
  }
}

/// Compute acc = the sum over stages of products times scales, for 64 rows by PARTS parts of COLUMNS columns; acc counts
/// the registers of all parts in order. The rows are read once per stage, to registers, so that products read shared
/// memory for the weights only. Parts use two scratch accumulators in turn: the products of one part are in flight while
/// those of the part before are scaled and added; the last part of a stage is added during the first of the next.
/// `row`: address in stage 0 of the 16 bytes at K = 0 that this lane names to ldmatrix, swizzled; those of further K differ
/// in bits 5 and 6, because stages are aligned to 1024 bytes. `scales` reads the scales of a stage from shared memory
/// (Take), makes them those of Add (Use), and adds scaled products (Add). `k_blocks` must be positive.
template <ptx::WgmmaType TYPE, int PARTS, int COLUMNS, int WAVES, int COUNT, int STAGES, typename Scales>
__device__ __forceinline__ void SumScaledParts(float (&acc)[WAVES][COUNT], const hopper::Ring<STAGES>& ring,
                                               hopper::RingPosition<STAGES>& at, const StageOperands& from,
                                               uint32_t row, int k_blocks, uint32_t cluster, Scales& scales) {
  constexpr int STEPS = hopper::SLAB_ROW_BYTES / hopper::WGMMA_K_BYTES;
  static_assert(PARTS % 2 == 0 && PARTS * COLUMNS == 2 * WAVES * COUNT, "parts of the accumulators");
  float even[COLUMNS / 2], odd[COLUMNS / 2];
#pragma unroll
  for (int i = 0; i < WAVES * COUNT; ++i) acc[i / COUNT][i % COUNT] = 0.f;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) odd[i] = 0.f;  // added in the first stage, like the last part of a stage before
  uint32_t a[STEPS][4] = {};
  int previous = -1;
  do {
    ring.WaitFull(at);
    scales.Take(at.stage);
    const auto load = [&](int first, int end) {
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        if (k < first || k >= end) continue;
        ptx::LdMatrix(a[k], (row + at.stage * from.stage_bytes) ^ (k * hopper::WGMMA_K_BYTES));
      }
    };
    ptx::WgmmaWait<1>();  // the first half of the last part of the stage before has ended
    ptx::WgmmaPin(a[0]);
    ptx::WgmmaPin(a[1]);
    load(0, STEPS / 2);
    ptx::WgmmaWait<0>();  // the whole last part has ended; it read the same registers
    ptx::WgmmaPin(odd);
    ptx::WgmmaPin(a[2]);
    ptx::WgmmaPin(a[3]);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      float (&now)[COLUMNS / 2] = part % 2 ? odd : even;
      float (&before)[COLUMNS / 2] = part % 2 ? even : odd;
      ptx::WgmmaPin(now);
      ptx::WgmmaFence();
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        if (part == 0 && k == STEPS / 2) {
          load(STEPS / 2, STEPS);
          ptx::WgmmaFence();
        }
        if (part == PARTS - 1 && k == STEPS / 2) ptx::WgmmaCommit();  // the next stage replaces a[0] first
        const int offset = part * COLUMNS * hopper::SLAB_ROW_BYTES + k * hopper::WGMMA_K_BYTES;
        ptx::Wgmma<TYPE, COLUMNS>::Run(now, a[k], hopper::AdvanceDescriptor(from.B(at.stage), offset), k > 0);
      }
      ptx::WgmmaCommit();
      if (part == 0) {
        __syncwarp();  // all lanes have read the scales and rows of the stage before
        if (previous >= 0) ring.Release(previous, cluster);
        scales.Add(acc, odd, PARTS - 1);
        scales.Use();
      } else {
        if (part == PARTS - 1) {
          ptx::WgmmaWait<2>();
        } else {
          ptx::WgmmaWait<1>();
        }
        ptx::WgmmaPin(before);
        scales.Add(acc, before, part - 1);
      }
    }
    previous = at.stage;
    at.Advance();
  } while (--k_blocks > 0);
  ptx::WgmmaWait<0>();
  ptx::WgmmaPin(odd);
  __syncwarp();
  ring.Release(previous, cluster);
  scales.Add(acc, odd, PARTS - 1);
}

#endif

}  // namespace gemm
}  // namespace flashinfer
