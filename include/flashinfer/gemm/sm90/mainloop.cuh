// SPDX-License-Identifier: Apache-2.0
// Sums over K of one consumer warpgroup: WAVES times 64 rows (side A of wgmma) by COLUMNS (side B).
#pragma once
#include <type_traits>

#include "../../hopper/ring.cuh"
#include "../../hopper/smem_tile.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/pin.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"

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

/// Return a descriptor that all lanes of the warp have, so that the compiler computes with it in uniform registers.
__device__ __forceinline__ uint64_t Uniform(uint64_t descriptor) {
  return (descriptor & 0xFFFFFFFF00000000ull) | __shfl_sync(~0u, uint32_t(descriptor), 0);
}

/// Issue the four products of a stage for the 64 rows at `a`.
template <ptx::WgmmaType TYPE, int COLUMNS>
__device__ __forceinline__ void StageProducts(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b, bool accumulate) {
#pragma unroll
  for (int k = 0; k < hopper::SLAB_ROW_BYTES / hopper::WGMMA_K_BYTES; ++k) {
    ptx::Wgmma<TYPE, COLUMNS>::Run(d, hopper::AdvanceDescriptor(a, k * hopper::WGMMA_K_BYTES),
                                   hopper::AdvanceDescriptor(b, k * hopper::WGMMA_K_BYTES), accumulate || k > 0);
  }
}

/// Advance by STEP stages, as one of STEP consumers that take stages in turn.
template <int STEP, int STAGES>
__device__ __forceinline__ void Advance(hopper::RingPosition<STAGES>& at) {
  if constexpr (STEP == 1) {
    at.Advance();
  } else {
    at.template Skip<STEP>();
  }
}

/// Compute acc = the sum over `k_blocks` stages, in the accumulators of the tensor cores. The products of one stage are
/// in flight while the warpgroup waits for the next stage. A stage is released after the products of the next stage are
/// issued. STEP: stages from one to the next; there may be none if other consumers take those between.
template <ptx::WgmmaType TYPE, int WAVES, int COLUMNS, int STEP = 1, int STAGES>
__device__ __forceinline__ void SumStages(float (&acc)[WAVES][COLUMNS / 2], const hopper::Ring<STAGES>& ring,
                                          hopper::RingPosition<STAGES>& at, const StageOperands& from, int k_blocks,
                                          uint32_t cluster) {
  if (STEP > 1 && k_blocks == 0) {
#pragma unroll
    for (int i = 0; i < WAVES * COLUMNS / 2; ++i) acc[i / (COLUMNS / 2)][i % (COLUMNS / 2)] = 0.f;
    return;
  }
  int previous = 0;
  for (int kb = 0; kb < k_blocks; ++kb) {
    ring.WaitFull(at);
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
    Advance<STEP>(at);
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
/// is in fp32: tensor cores keep only some 13 bits of fp8 accumulators. `scales` reads the scales of a stage from shared
/// memory (Take), and adds scaled products (Add). STEP: stages from one to the next.
template <ptx::WgmmaType TYPE, int WAVES, int COLUMNS, int STEP = 1, int STAGES, typename Scales>
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
    Advance<STEP>(at);
  }
}

/// Compute as SumScaledStages the sums of 64 rows (acc[0]) and of the 64 rows that are `distance` bytes behind them (acc[1]),
/// whose products are in flight together.
template <ptx::WgmmaType TYPE, int COLUMNS, int STAGES, typename Scales>
__device__ __forceinline__ void SumScaledHalves(float (&acc)[2][COLUMNS / 2], const hopper::Ring<STAGES>& ring,
                                                hopper::RingPosition<STAGES>& at, const StageOperands& from,
                                                uint32_t distance, int k_blocks, Scales& scales) {
  float scratch[2][COLUMNS / 2];
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) acc[i % 2][i / 2] = 0.f;
  for (int kb = 0; kb < k_blocks; ++kb) {
    ring.WaitFull(at);
    scales.Take(at.stage);
#pragma unroll
    for (int half = 0; half < 2; ++half) ptx::WgmmaPin(scratch[half]);
    ptx::WgmmaFence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t a = hopper::AdvanceDescriptor(from.A(at.stage), half * distance);
      StageProducts<TYPE, COLUMNS>(scratch[half], a, from.B(at.stage), false);
    }
    ptx::WgmmaCommit();
    ptx::WgmmaWait<0>();
#pragma unroll
    for (int half = 0; half < 2; ++half) ptx::WgmmaPin(scratch[half]);
    __syncwarp();  // all lanes have read the scales
    ring.Release(at.stage, 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) scales.Add(acc[half], scratch[half], half);
    at.Advance();
  }
}

/// Compute acc = the sum over stages of products times scales, for 64 rows by PARTS parts of COLUMNS columns; acc counts
/// the registers of all parts in order. Parts use two scratch accumulators in turn: the products of one part are in flight
/// while those of the part before are scaled and added. The first part of a stage reads its rows in shared memory, so that
/// it is issued while the last part of the stage before is in flight. Of four parts, the others read them in registers, so
/// that their products read shared memory for the weights only. ptxas follows products in flight through straight code, but
/// not around a loop: a round of the loop has several stages, and waits for all products at its end.
/// `row`: address in stage 0 of the 16 bytes at K = 0 that this lane names to ldmatrix, swizzled; those of further K differ
/// in bits 5 and 6, because stages are aligned to 1024 bytes. `scales` reads the scales of a stage from shared memory
/// (Take), makes them those of Add (Use), and adds scaled products (Add). COPIED: cp.async wrote the rows, like ordinary
/// stores, which the tensor cores see after a fence.
template <ptx::WgmmaType TYPE, int PARTS, int COLUMNS, bool COPIED, int WAVES, int COUNT, int STAGES, typename Scales>
__device__ __forceinline__ void SumScaledParts(float (&acc)[WAVES][COUNT], const hopper::Ring<STAGES>& ring,
                                               hopper::RingPosition<STAGES>& at, const StageOperands& from,
                                               uint32_t row, int k_blocks, uint32_t cluster, Scales& scales) {
  constexpr int STEPS = hopper::SLAB_ROW_BYTES / hopper::WGMMA_K_BYTES;
  constexpr int SHARED_PARTS = PARTS > 2 ? 1 : PARTS;  // parts that read rows in shared memory
  constexpr int ROUND = 4;                             // stages
  static_assert(PARTS % 2 == 0 && PARTS * COLUMNS == 2 * WAVES * COUNT, "parts of the accumulators");
  float even[COLUMNS / 2], odd[COLUMNS / 2];
  uint32_t a[STEPS][4];
#pragma unroll
  for (int i = 0; i < WAVES * COUNT; ++i) acc[i / COUNT][i % COUNT] = 0.f;
  uint64_t a_stage = 0, b_stage = 0;
  const auto wait_full = [&] {
    // The compiler keeps what a shuffle gives in uniform registers, and computes the descriptors of products there. It
    // must not move the shuffles up between products of the stage before, which would wait for them.
    ptx::Pin(at.stage);
    a_stage = Uniform(from.A(at.stage)), b_stage = Uniform(from.B(at.stage));
    ring.WaitFull(at);
    if constexpr (COPIED) ptx::FenceAsyncProxy();
  };
  const auto issue = [&](int part) {
    float (&now)[COLUMNS / 2] = part % 2 ? odd : even;
    const uint64_t b = hopper::AdvanceDescriptor(b_stage, part * COLUMNS * hopper::SLAB_ROW_BYTES);
    ptx::WgmmaPin(now);
    ptx::WgmmaFence();
    if (part < SHARED_PARTS) {
      StageProducts<TYPE, COLUMNS>(now, a_stage, b, false);
    } else {
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        ptx::Wgmma<TYPE, COLUMNS>::Run(now, a[k], hopper::AdvanceDescriptor(b, k * hopper::WGMMA_K_BYTES), k > 0);
      }
    }
    ptx::WgmmaCommit();
  };
  const auto load_rows = [&] {
    if (SHARED_PARTS == PARTS) return;
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      ptx::LdMatrix(a[k], (row + at.stage * from.stage_bytes) ^ (k * hopper::WGMMA_K_BYTES));
    }
  };
  const auto pin_rows = [&] {
    if (SHARED_PARTS == PARTS) return;
#pragma unroll
    for (int k = 0; k < STEPS; ++k) ptx::WgmmaPin(a[k]);
  };
  // Issue the parts after the first, and add all but the last.
  const auto other_parts = [&](auto has_next) {
    scales.Use();
#pragma unroll
    for (int part = 1; part < PARTS; ++part) {
      issue(part);
      if (part == PARTS - 1 && decltype(has_next)::value) {
        at.Advance();
        wait_full();
      }
      ptx::WgmmaWait<1>();  // the part before has ended
      float (&before)[COLUMNS / 2] = part % 2 ? even : odd;
      ptx::WgmmaPin(before);
      scales.Add(acc, before, part - 1);
    }
  };
  const auto end_last_part = [&](int stage) {
    ptx::WgmmaPin(odd);
    __syncwarp();  // all lanes have read the scales and rows of the stage
    ring.Release(stage, cluster);
    scales.Add(acc, odd, PARTS - 1);
  };
  const auto run_round = [&](auto stages) {
    wait_full();
    issue(0);
    scales.Take(at.stage);  // after the products have been issued, so that they do not wait for it
    load_rows();
#pragma unroll
    for (int i = 1; i < decltype(stages)::value; ++i) {
      const int previous = at.stage;
      other_parts(std::true_type());
      issue(0);
      scales.Take(at.stage);
      ptx::WgmmaWait<1>();  // the last part of the stage before has ended
      pin_rows();
      load_rows();
      end_last_part(previous);
    }
    other_parts(std::false_type());
    ptx::WgmmaWait<0>();
    pin_rows();
    end_last_part(at.stage);
    at.Advance();
  };
  for (; k_blocks >= ROUND; k_blocks -= ROUND) run_round(std::integral_constant<int, ROUND>());
  for (; k_blocks > 0; --k_blocks) run_round(std::integral_constant<int, 1>());
}

#endif

}  // namespace gemm
}  // namespace flashinfer
