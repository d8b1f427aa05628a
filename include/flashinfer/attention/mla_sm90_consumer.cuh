// SPDX-License-Identifier: Apache-2.0
// MLA decode on SM90: the two consumer warpgroups.
//
// Warpgroup 0 has output columns 0 to 255, warpgroup 1 columns 256 to 511: the output of 64 rows fills the registers of
// both. Blocks of keys are taken in pairs. Warpgroup 0 computes the scores of the first block, warpgroup 1 those of the
// second; each then multiplies the weights of both blocks by its columns of the values, those of the first block first.
// Both halves of the first buffer are so released early, and its next keys arrive while the second block is multiplied.
//
//   warpgroup 0                                            warpgroup 1
//   S0 = Q K0^T, m0 = max(m, S0), P0 = 2^(S0 - m0)         S1 = Q K1^T
//   give m0, P0
//   O = O 2^(m - m0) + P0 V0[left]                         O = O 2^(m - m0) + P0 V0[right]
//                                                          m1 = max(m0, S1), P1 = 2^(S1 - m1), give m1, P1
//   O = O 2^(m0 - m1) + P1 V1[left]                        O = O 2^(m0 - m1) + P1 V1[right]
//
// The softmax of warpgroup 0 runs while warpgroup 1 computes scores, and the softmax of warpgroup 1 while both multiply
// P0. Each part of a buffer is released, before anything else is waited for, by the warpgroup that multiplies it. A last
// block without a partner is multiplied by both, with the weights of warpgroup 0.
#pragma once
#include "../ptx/cp_async.cuh"
#include "../ptx/stmatrix.cuh"
#include "mla_sm90_softmax.cuh"

namespace flashinfer {
namespace attention {
namespace mla {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename T>
constexpr ptx::WgmmaType TYPE_OF = std::is_same_v<T, __half> ? ptx::WgmmaType::kF16 : ptx::WgmmaType::kBf16;

/// Products and barriers of warpgroup GROUP. COPIED: keys come with cp.async, which the tensor cores see after a fence,
/// and without rows to clear.
template <typename T, int GROUP, bool COPIED>
struct Consumer {
  static constexpr ptx::WgmmaType TYPE = TYPE_OF<T>;
  static constexpr int OTHER = 1 - GROUP;
  const Shared shared;
  const float scale;              // sm_scale * log2(e)
  uint32_t parities[2] = {0, 0};  // phase of each buffer

  /// Return `shared` by way of a shuffle: its value is uniform, and the compiler computes descriptors where they are
  /// used instead of keeping those of 40 products in registers.
  __device__ __forceinline__ Shared Here() const { return {__shfl_sync(~0u, shared.base, 0), shared.memory}; }

  __device__ __forceinline__ void WaitSlab(const Shared& here, int buffer, int slab) const {
    ptx::MbarrierWait(here.Full(buffer, slab), parities[buffer]);
    if constexpr (COPIED) ptx::FenceAsyncProxy();
  }

  /// Clear the rows of this warpgroup's buffer from `rows` on: weights of 0 do not hide what unused memory holds. The
  /// scores of the block are done. A barrier follows before the other warpgroup reads the rows.
  __device__ __forceinline__ void ClearRows(int rows) const {
    if constexpr (!COPIED) {
      if (rows >= KEYS) return;
      for (int i = rows * 8 + int(threadIdx.x) % WARPGROUP; i < KEYS * 8; i += WARPGROUP) {
#pragma unroll
        for (int slab = 0; slab < ROTARY_SLAB; ++slab) {
          ptx::StoreShared16(shared.Keys(GROUP) + slab * SLAB_BYTES + i * 16, uint4{});
        }
      }
      ptx::FenceAsyncProxy();
      ptx::BarrierSync(kZeroed + GROUP, WARPGROUP);
    }
  }

  /// Compute the scores of this warpgroup's block. The columns that this warpgroup releases itself come first.
  __device__ __forceinline__ void Scores(float (&s)[32]) const {
    const Shared here = Here();
    const uint64_t q = hopper::DescriptorKMajor(here.Query()), k = hopper::DescriptorKMajor(here.Keys(GROUP));
#pragma unroll
    for (int i = 0; i < SLABS; ++i) {
      const int slab = i < ROTARY_SLAB ? i ^ (GROUP * HALF_SLABS) : ROTARY_SLAB;
      WaitSlab(here, GROUP, slab);
      ptx::WgmmaFence();  // again after each wait, whose loop ends the sequence of products for ptxas
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint32_t at = slab * SLAB_BYTES + step * hopper::WGMMA_K_BYTES;
        ptx::Wgmma<TYPE, KEYS>::Run(s, hopper::AdvanceDescriptor(q, at), hopper::AdvanceDescriptor(k, at),
                                    i + step > 0);
      }
    }
    ptx::WgmmaCommit();
    ptx::WgmmaWait<0>();
    ptx::WgmmaPin(s);
  }

  /// Return the descriptor of 16 keys of this warpgroup's columns of the values in `buffer`.
  static __device__ __forceinline__ uint64_t Values(const Shared& here, int buffer, int step) {
    const uint32_t at = here.Keys(buffer) + GROUP * HALF_SLABS * SLAB_BYTES;
    return hopper::AdvanceDescriptor(hopper::DescriptorMnMajor(at, KEYS), step * 16 * hopper::SLAB_ROW_BYTES);
  }

  /// Issue o += weights in registers times values.
  __device__ __forceinline__ void IssueOwn(float (&o)[HALF / 2], const uint32_t (&weights)[16]) const {
    const Shared here = Here();
    ptx::WgmmaPin(o);
    ptx::WgmmaFence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t a[4] = {weights[4 * step], weights[4 * step + 1], weights[4 * step + 2], weights[4 * step + 3]};
      ptx::Wgmma<TYPE, HALF, false, true>::Run(o, a, Values(here, GROUP, step), true);
    }
    ptx::WgmmaCommit();
  }

  /// Wait until this warpgroup's columns of the other buffer have landed. The scores of the other warpgroup needed them.
  __device__ __forceinline__ void WaitOther() const {
    const Shared here = Here();
#pragma unroll
    for (int slab = 0; slab < HALF_SLABS; ++slab) WaitSlab(here, OTHER, GROUP * HALF_SLABS + slab);
  }

  /// Issue o += weights of the other warpgroup, in shared memory, times values.
  __device__ __forceinline__ void IssueOther(float (&o)[HALF / 2]) const {
    const Shared here = Here();
    const uint64_t a = hopper::DescriptorKMajor(here.Weights(OTHER));
    ptx::WgmmaPin(o);
    ptx::WgmmaFence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::Wgmma<TYPE, HALF, false, true>::Run(o, hopper::AdvanceDescriptor(a, step * hopper::WGMMA_K_BYTES),
                                               Values(here, OTHER, step), true);
    }
    ptx::WgmmaCommit();
  }

  /// Finish the products of the values in `buffer`, and release this warpgroup's half of it.
  __device__ __forceinline__ void Finish(float (&o)[HALF / 2], int buffer) {
    ptx::WgmmaWait<0>();
    ptx::WgmmaPin(o);
    if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(shared.Empty(buffer, GROUP));
    parities[buffer] ^= 1;
  }

  /// Write the weights of this warpgroup's block for the other one. A barrier must follow.
  __device__ __forceinline__ void GiveWeights(const uint32_t (&words)[16]) const {
    const int lane = threadIdx.x % 32, row = int(threadIdx.x) % WARPGROUP / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t at = hopper::Swizzle128(row * hopper::SLAB_ROW_BYTES + (2 * step + lane / 16) * 16);
      ptx::StoreMatrix4(shared.Weights(GROUP) + at, words[4 * step], words[4 * step + 1], words[4 * step + 2],
                        words[4 * step + 3]);
    }
    ptx::FenceAsyncProxy();
  }

  /// Let the next query replace this one. No scores are left to compute.
  __device__ __forceinline__ void ReleaseQuery() const {
    if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(shared.QueryEmpty());
  }

  __device__ __forceinline__ void Arrive(Barrier barrier) const { ptx::BarrierArrive(barrier, 2 * WARPGROUP); }
  __device__ __forceinline__ void Sync(Barrier barrier) const { ptx::BarrierSync(barrier, 2 * WARPGROUP); }
};

/// State of the rows of a thread: maxima (times scale) and sums of the weights of its own blocks.
struct RowState {
  RowPair maximum = {-math::inf, -math::inf}, sum = {0.f, 0.f};

  /// Replace the maxima. Returns the factors that make sums relative to the new ones.
  __device__ __forceinline__ RowPair Raise(const RowPair& to) {
    const RowPair factor = Factors(maximum, to);
    maximum = to;
    sum[0] *= factor[0], sum[1] *= factor[1];
    return factor;
  }
};

/// Attend to all keys of an item, of which there is at least one: warpgroup 0. Every part of the code exists once: most
/// launches find no instruction in the caches.
template <typename T, bool COPIED>
__device__ __forceinline__ void Attend(Consumer<T, 0, COPIED>& c, float (&o)[HALF / 2], RowState& state,
                                       const WorkItem& item, const Limits& limits) {
#pragma unroll 1
  for (int key = item.kv_start; key < item.kv_end; key += 2 * KEYS) {
    float s[32];
    c.Scores(s);
    if (key + 2 * KEYS >= item.kv_end) c.ReleaseQuery();
    Mask(s, limits, key);
    c.ClearRows(item.kv_end - key);
    RowPair factor = state.Raise(Maxima(s, state.maximum, c.scale));
    WriteRows(c.shared.Maxima(0), state.maximum);
    Weigh(s, state.maximum, c.scale, state.sum);
    uint32_t words[16];
    RoundWeights<T>(words, s);
    c.GiveWeights(words);
    c.Arrive(kFirstWeights);
    ScaleRows(o, factor);
    c.IssueOwn(o, words);
    c.Finish(o, 0);
    if (key + KEYS >= item.kv_end) break;
    c.WaitOther();
    c.Sync(kSecondWeights);
    factor = state.Raise(ReadRows(c.shared.Maxima(1)));
    ScaleRows(o, factor);
    c.IssueOther(o);
    c.Finish(o, 1);
  }
}

/// Attend to all keys of an item: warpgroup 1.
template <typename T, bool COPIED>
__device__ __forceinline__ void Attend(Consumer<T, 1, COPIED>& c, float (&o)[HALF / 2], RowState& state,
                                       const WorkItem& item, const Limits& limits) {
#pragma unroll 1
  for (int key = item.kv_start; key < item.kv_end; key += 2 * KEYS) {
    const int own = key + KEYS;
    const bool has_own = own < item.kv_end;
    float s[32];
    if (has_own) {
      c.Scores(s);
      Mask(s, limits, own);
      c.ClearRows(item.kv_end - own);
    }
    if (key + 2 * KEYS >= item.kv_end) c.ReleaseQuery();
    c.WaitOther();
    c.Sync(kFirstWeights);
    RowPair factor = state.Raise(ReadRows(c.shared.Maxima(0)));
    ScaleRows(o, factor);
    c.IssueOther(o);
    if (!has_own) {
      c.Finish(o, 0);
      break;
    }
    factor = state.Raise(Maxima(s, state.maximum, c.scale));
    WriteRows(c.shared.Maxima(1), state.maximum);
    Weigh(s, state.maximum, c.scale, state.sum);
    uint32_t words[16];
    RoundWeights<T>(words, s);
    c.GiveWeights(words);
    c.Arrive(kSecondWeights);
    c.Finish(o, 0);
    ScaleRows(o, factor);
    c.IssueOwn(o, words);
    c.Finish(o, 1);
  }
}

#endif

}  // namespace mla
}  // namespace attention
}  // namespace flashinfer
