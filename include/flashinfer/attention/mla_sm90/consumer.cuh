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
// P0. What limits a pair of blocks is the way of the second buffer: release, load, scores, softmax, products. So values
// are multiplied in parts of a few columns, each of which is released as soon as its products are done, and scores take
// the slabs in the order in which they arrive. A last block without a partner is multiplied by both, with the weights of
// warpgroup 0.
#pragma once
#include <utility>

#include "../../ptx/cp_async.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/stmatrix.cuh"
#include "softmax.cuh"

namespace flashinfer {
namespace attention {
namespace mla {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename T>
constexpr ptx::WgmmaType TYPE_OF = std::is_same_v<T, __half> ? ptx::WgmmaType::kF16 : ptx::WgmmaType::kBf16;

/// Products and barriers of warpgroup GROUP. COPIED: keys come with cp.async, which the tensor cores see after a fence,
/// and without rows to clear. ROTATED: keys have rotary columns; without them their slab holds weights only.
template <typename T, int GROUP, bool COPIED, bool ROTATED = true>
struct Consumer {
  static constexpr ptx::WgmmaType TYPE = TYPE_OF<T>;
  static constexpr int FIRST = ROTATED ? 0 : 1;  // place of the first slab that scores take (SlabAt)
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
      ptx::BarrierSync(int(NamedBarrier::kZeroed) + GROUP, WARPGROUP);
    }
  }

  /// Return the offset in a slab of the 16 bytes that this lane addresses in ldmatrix and stmatrix, for product `step`.
  static __device__ __forceinline__ uint32_t FragmentAt(int step) {
    const int lane = threadIdx.x % 32, row = int(threadIdx.x) % WARPGROUP / 32 * 16 + lane % 16;
    return hopper::Swizzle128(row * hopper::SLAB_ROW_BYTES + (2 * step + lane / 16) * 16);
  }

  /// Load the fragments of four products from a slab of 64 rows.
  static __device__ __forceinline__ void LoadFragments(uint32_t (&words)[16], uint32_t slab) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t a[4];
      ptx::LdMatrix(a, slab + FragmentAt(step));
#pragma unroll
      for (int i = 0; i < 4; ++i) words[4 * step + i] = a[i];
    }
  }

  /// Return the slab that scores take at place `i`: the rotary slab is released first. The halves of the second buffer
  /// are released at the same time, the left half of the first buffer before the right one.
  static __device__ __forceinline__ constexpr int SlabAt(int i) {
    if (i == 0) return ROTARY_SLAB;
    return GROUP == 0 ? i - 1 : (i - 1) / 2 + (i % 2) * HALF_SLABS;
  }

  /// Compute the scores of this warpgroup's block.
  __device__ __forceinline__ void Scores(float (&s)[32]) {
    const Shared here = Here();
    const uint64_t q = hopper::DescriptorKMajor(here.Query()), k = hopper::DescriptorKMajor(here.Keys(GROUP));
#pragma unroll
    for (int i = 0; i < SLABS; ++i) {
      const int slab = SlabAt(i);
      WaitSlab(here, GROUP, slab);
      if (i < FIRST) continue;
      ptx::WgmmaFence();  // again after each wait, whose loop ends the sequence of products for ptxas
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint32_t at = slab * SLAB_BYTES + step * hopper::WGMMA_K_BYTES;
        const uint64_t b = hopper::AdvanceDescriptor(k, at);
        ptx::Wgmma<TYPE, KEYS>::Run(s, hopper::AdvanceDescriptor(q, at), b, i + step > FIRST);
      }
    }
    ptx::WgmmaCommit();
    ptx::WgmmaWait<0>();
    ptx::WgmmaPin(s);
  }

  /// Wait until this warpgroup's columns of the other buffer have landed. The scores of the other warpgroup needed them.
  __device__ __forceinline__ void WaitOther() const {
    const Shared here = Here();
#pragma unroll
    for (int slab = 0; slab < HALF_SLABS; ++slab) WaitSlab(here, OTHER, GROUP * HALF_SLABS + slab);
  }

  /// Take the weights of the other warpgroup, and let the next rotary columns replace them.
  __device__ __forceinline__ void TakeWeights(uint32_t (&words)[16]) const {
    LoadFragments(words, shared.Weights(OTHER));
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(shared.Empty(OTHER, ROTARY_SLAB));
  }

  /// Issue o += weights times this warpgroup's columns of the values in `buffer`, one group per part.
  __device__ __forceinline__ void Issue(float (&o)[HALF / 2], const uint32_t (&weights)[16], int buffer) const {
    constexpr int COLUMNS = HALF / PARTS;
    const Shared here = Here();
    const uint64_t values = hopper::DescriptorMnMajor(here.Keys(buffer) + GROUP * HALF_SLABS * SLAB_BYTES, KEYS);
    ptx::WgmmaPin(o);
    ptx::WgmmaFence();
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      auto& d = reinterpret_cast<float (&)[COLUMNS / 2]>(o[part * COLUMNS / 2]);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint32_t a[4] = {weights[4 * step], weights[4 * step + 1], weights[4 * step + 2], weights[4 * step + 3]};
        const uint32_t at = part * COLUMNS / SLAB_COLUMNS * SLAB_BYTES + step * 16 * hopper::SLAB_ROW_BYTES;
        ptx::Wgmma<TYPE, COLUMNS, false, true>::Run(d, a, hopper::AdvanceDescriptor(values, at), true);
      }
      ptx::WgmmaCommit();
    }
  }

  /// Finish the products of some parts of `buffer`, in order and without groups issued later, and release the parts.
  template <int... PART>
  __device__ __forceinline__ void Release(int buffer, std::integer_sequence<int, PART...>) const {
    (ReleasePart<PART>(buffer), ...);
  }
  template <int PART>
  __device__ __forceinline__ void ReleasePart(int buffer) const {
    constexpr int COUNT = HALF_SLABS / PARTS;
    ptx::WgmmaWait<PARTS - 1 - PART>();
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) ptx::MbarrierArrive(shared.Empty(buffer, GROUP * HALF_SLABS + PART * COUNT + i));
    }
  }

  /// Finish all products of the values in `buffer`, and release this warpgroup's half of it.
  __device__ __forceinline__ void Finish(float (&o)[HALF / 2], uint32_t (&weights)[16], int buffer) {
    Release(buffer, std::make_integer_sequence<int, PARTS>());
    ptx::WgmmaPin(o);
    ptx::WgmmaPin(weights);
    parities[buffer] ^= 1;
  }

  /// Write the weights of this warpgroup's block for the other one. A barrier must follow.
  __device__ __forceinline__ void GiveWeights(const uint32_t (&words)[16]) const {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::StoreMatrix4(shared.Weights(GROUP) + FragmentAt(step), words[4 * step], words[4 * step + 1],
                        words[4 * step + 2], words[4 * step + 3]);
    }
    ptx::FenceAsyncProxy();
  }

  /// Let the next query replace this one. No scores are left to compute.
  __device__ __forceinline__ void ReleaseQuery() const {
    if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(shared.QueryEmpty());
  }

  /// Arrive without waiting. racecheck does not know that this orders the accesses before it: for that tool, wait too.
  __device__ __forceinline__ void Arrive(NamedBarrier barrier) const {
#ifdef FLASHINFER_RACECHECK
    Sync(barrier);
#else
    ptx::BarrierArrive(int(barrier), 2 * WARPGROUP);
#endif
  }
  __device__ __forceinline__ void Sync(NamedBarrier barrier) const {
    ptx::BarrierSyncApart(int(barrier), 2 * WARPGROUP);
  }
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
template <typename T, bool COPIED, bool ROTATED>
__device__ __forceinline__ void Attend(Consumer<T, 0, COPIED, ROTATED>& c, float (&o)[HALF / 2], RowState& state,
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
    c.Arrive(NamedBarrier::kFirstWeights);
    ScaleRows(o, factor);
    c.Issue(o, words, 0);
    c.Finish(o, words, 0);
    if (key + KEYS >= item.kv_end) break;
    c.WaitOther();
    c.Sync(NamedBarrier::kSecondWeights);
    factor = state.Raise(ReadRows(c.shared.Maxima(1)));
    c.TakeWeights(words);
    ScaleRows(o, factor);
    c.Issue(o, words, 1);
    c.Finish(o, words, 1);
  }
}

/// Multiply the weights of the first block of a pair, whose keys have all landed once the weights are given: warpgroup 1.
template <typename T, bool COPIED, bool ROTATED>
__device__ __forceinline__ void IssueFirst(Consumer<T, 1, COPIED, ROTATED>& c, float (&o)[HALF / 2], RowState& state,
                                           uint32_t (&words)[16]) {
  c.WaitOther();
  c.Sync(NamedBarrier::kFirstWeights);
  const RowPair factor = state.Raise(ReadRows(c.shared.Maxima(0)));
  c.TakeWeights(words);
  ScaleRows(o, factor);
  c.Issue(o, words, 0);
}

/// Attend to all keys of an item: warpgroup 1.
template <typename T, bool COPIED, bool ROTATED>
__device__ __forceinline__ void Attend(Consumer<T, 1, COPIED, ROTATED>& c, float (&o)[HALF / 2], RowState& state,
                                       const WorkItem& item, const Limits& limits) {
  int own = item.kv_start + KEYS;
  if (own >= item.kv_end) c.ReleaseQuery();
#pragma unroll 1
  for (; own < item.kv_end; own += 2 * KEYS) {
    float s[32];
    uint32_t first[16], second[16];
    c.Scores(s);
    IssueFirst(c, o, state, first);
    if (own + 2 * KEYS >= item.kv_end) c.ReleaseQuery();
    Mask(s, limits, own);
    c.ClearRows(item.kv_end - own);
    const RowPair factor = state.Raise(Maxima(s, state.maximum, c.scale));
    WriteRows(c.shared.Maxima(1), state.maximum);
    Weigh(s, state.maximum, c.scale, state.sum);
    RoundWeights<T>(second, s);
    c.GiveWeights(second);
    c.Arrive(NamedBarrier::kSecondWeights);
    c.Finish(o, first, 0);
    ScaleRows(o, factor);
    c.Issue(o, second, 1);
    c.Finish(o, second, 1);
  }
  if (own - KEYS < item.kv_end) {
    uint32_t words[16];
    IssueFirst(c, o, state, words);
    c.Finish(o, words, 0);
  }
}

#endif

}  // namespace mla
}  // namespace attention
}  // namespace flashinfer
