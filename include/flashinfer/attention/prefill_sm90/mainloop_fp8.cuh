// SPDX-License-Identifier: Apache-2.0
// Main loop of a consumer warpgroup of the Hopper prefill kernel for e4m3 queries, keys and values: that of
// mainloop.cuh, whose products take half of the time, so that each instruction counts.
//
// - Steps with and without a mask have loops of their own: accumulators keep their registers where a loop has one path.
// - Half of the exponentials are computed while the products of values run; the others, and the rounding of weights to
//   the registers of those products, follow when the values are free for the producer.
// - Where the tiles of the next step lie, and whether they have arrived, is found while weights are computed: products are
//   issued at the beginning of a step without delay. Descriptors are the same in all lanes, for the uniform datapath.
// - Queries stay in registers (HOLDS_QUERY), and their tile is free for the next item at once.
#pragma once
#include "../../ptx/mma.cuh"
#include "mainloop.cuh"
#include "shape_fp8.cuh"

namespace flashinfer {
namespace attention {
namespace prefill_sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Second level of the sums of a thread, for products whose accumulators have few bits (Fp8Traits): fp32 in shared memory,
/// with the exponents of their rows.
template <typename Tr>
struct Sums {
  static constexpr int COUNT = Tr::D_VO / 8, STRIDE = Tr::TILE * 32;
  const uint32_t memory;
  float m[2];
  bool is_empty = true;

  /// Add `o` to the sums, and zero it.
  template <typename Rows>
  __device__ __forceinline__ void Take(const Rows& rows, float (&o)[Tr::D_VO / 2]) {
    if (!is_empty) AddTo(rows, o);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      float* x = o + 4 * i;
      ptx::StoreShared16(memory + i * STRIDE, uint4{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                                                    __float_as_uint(x[3])});
      x[0] = x[1] = x[2] = x[3] = 0.f;
    }
    m[0] = rows.m[0], m[1] = rows.m[1];
    is_empty = false;
  }

  /// Add the sums to `o`, at the exponents that the rows have now.
  template <typename Rows>
  __device__ __forceinline__ void AddTo(const Rows& rows, float (&o)[Tr::D_VO / 2]) const {
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = rows.m[i] == m[i] ? 1.f : ptx::Exp2(m[i] - rows.m[i]);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const float4 x = ptx::LoadShared16(memory + i * STRIDE);
      o[4 * i] += x.x * factor[0], o[4 * i + 1] += x.y * factor[0];
      o[4 * i + 2] += x.z * factor[1], o[4 * i + 3] += x.w * factor[1];
    }
  }
};

/// `HOLDS_QUERY`: queries stay in registers.
template <typename Tr, bool HOLDS_QUERY>
struct Fp8MainLoop {
  static constexpr ptx::WgmmaType TYPE = ptx::WgmmaType::kE4m3;
  static constexpr int DEPTH = hopper::WGMMA_K_BYTES;  // columns per product
  static constexpr int QK_PRODUCTS = Tr::D_QK / DEPTH, VO_PRODUCTS = Tr::KEYS / DEPTH;
  static constexpr int EARLY_KEYS = Tr::KEYS / 2;  // exponentials before the wait for values
  using Scores = float[Tr::KEYS / 2];
  using Output = float[Tr::D_VO / 2];
  using Query = uint32_t[HOLDS_QUERY ? QK_PRODUCTS : 1][4];
  using Weights = uint32_t[VO_PRODUCTS][4];

  const Shared<Tr> shared;
  const int group;
  const PingPong<Tr> ping_pong;
  uint32_t count = 0;  // tiles of values used so far; keys are one tile ahead between Weigh and the next IssueScores
  uint32_t next_keys = 0, next_values = 0;  // low words of the descriptors of the tiles of the next step
  bool has_next = false;                    // they are known to have arrived

  __device__ __forceinline__ Fp8MainLoop(const Shared<Tr>& shared, int group)
      : shared(shared), group(group), ping_pong{group} {}

  /// Add all keys of the item to `o`. `release_query` is called once, after the last use of the query tile.
  template <typename Rows, typename F>
  __device__ __forceinline__ void Run(Rows& rows, Output& o, const WorkItem& item, int steps, const F& release_query) {
    Query q;
    Scores s;
    Weights w;
    if constexpr (HOLDS_QUERY) {
      LoadQuery(q);
      __syncwarp();
      release_query();
    }
    int left = steps - 1, key = item.kv_start + left * Tr::KEYS;  // left: steps behind this one
    WaitKeys(count);
    ping_pong.Wait();
    IssueScores(s, q, KeysAt(count));
    ping_pong.Pass();
    ptx::WgmmaWait<0>();
    ptx::WgmmaPin(s);
    ReleaseKeys(count);
    rows.template Weigh<true>(s, key);  // nothing to rescale yet
    Rows::Round(w, s);
    FindNext();
    has_next = false;
    Sums<Tr> sums{shared.Sums(int(threadIdx.x) - WARPGROUP)};
#pragma unroll 1
    while (left > 0) {
      // The steps until the sums are added, or all: those without a mask lie between those with one.
      int part = Tr::SUM_STEPS > 0 ? min(left, Tr::SUM_STEPS - 1) : left;
      left -= part;
#pragma unroll 1
      while (part > 0) {
#pragma unroll 1
        for (; part > 0 && rows.IsMasked(key - Tr::KEYS); --part) {
          Step<true>(rows, q, s, w, o, key -= Tr::KEYS);
        }
        int plain = rows.PlainSteps(key, part);
        part -= plain;
#pragma unroll 1
        for (; plain > 0; --plain) Step<false>(rows, q, s, w, o, key -= Tr::KEYS);
      }
      if constexpr (Tr::SUM_STEPS > 0) {
        if (left > 0) sums.Take(rows, o);
      }
    }
    if constexpr (!HOLDS_QUERY) release_query();
    WaitValues(count);
    IssueValues(o, w, ValuesAt(count));
    ptx::WgmmaWait<0>();
    ptx::WgmmaPin(o);
    ReleaseValues(count);
    ++count;
    if constexpr (Tr::SUM_STEPS > 0) {
      if (!sums.is_empty) sums.AddTo(rows, o);
    }
  }

 private:
  template <bool MASKED, typename Rows>
  __device__ __forceinline__ void Step(Rows& rows, const Query& q, Scores& s, Weights& w, Output& o, int key) {
    if (!has_next) WaitKeys(count + 1);
    ping_pong.Wait();
    IssueScores(s, q, next_keys);
    if (!has_next) WaitValues(count);
    IssueValues(o, w, next_values);
    ping_pong.Pass();
    ptx::WgmmaWait<1>();
    ptx::WgmmaPin(s);
    ReleaseKeys(count + 1);
    const bool grown = rows.template BeginWeigh<MASKED>(s, key);
    rows.template Exponentiate<0, EARLY_KEYS>(s);
    // All warps of the warpgroup must wait for products in one place. Sums of weights are not negative, and if they are NaN,
    // the values are there already: a branch that needs the sums, and that has a loop, keeps ptxas from waiting for the
    // products of values before these exponentials.
    if (!(rows.d[0] + rows.d[1] >= 0.f)) WaitValues(count);
    ptx::WgmmaWait<0>();
    ptx::WgmmaPin(o);
    if (grown) {
#pragma unroll
      for (int i = 0; i < Tr::D_VO / 2; ++i) o[i] *= rows.scale[i / 2 % 2];
    }
    ReleaseValues(count);
    ++count;
    FindNext();
    if constexpr (!Tr::GATHERS) {
      const bool has_keys = TestFull(shared.KeyBarriers(), TileAt<Tr::KEY_STAGES>(count + 1));
      has_next = TestFull(shared.ValueBarriers(), RingAt<Tr>(count)) & has_keys;
    }
    rows.template Exponentiate<EARLY_KEYS, Tr::KEYS>(s);
    Rows::Round(w, s);
  }

  /// A number that all lanes have, marked as such for the compiler.
  static __device__ __forceinline__ uint32_t Uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

  __device__ __forceinline__ uint32_t KeysAt(uint32_t tile) const {
    return Uniform(uint32_t(hopper::DescriptorKMajor(shared.Keys(TileAt<Tr::KEY_STAGES>(tile).stage))));
  }
  __device__ __forceinline__ uint32_t ValuesAt(uint32_t tile) const {
    return Uniform(uint32_t(hopper::DescriptorKMajor(shared.Values(RingAt<Tr>(tile).stage))));
  }
  __device__ __forceinline__ void FindNext() { next_keys = KeysAt(count + 1), next_values = ValuesAt(count); }

  template <int STAGES>
  static __device__ __forceinline__ bool TestFull(const hopper::Ring<STAGES>& ring,
                                                  const hopper::RingPosition<STAGES>& at) {
    return ptx::MbarrierTest(ring.Full(at.stage), at.parity);
  }
  __device__ __forceinline__ void WaitKeys(uint32_t tile) const {
    shared.KeyBarriers().WaitFull(TileAt<Tr::KEY_STAGES>(tile));
    if constexpr (Tr::GATHERS) ptx::FenceAsyncProxy();  // cp.async writes like ordinary stores
  }
  __device__ __forceinline__ void WaitValues(uint32_t tile) const { shared.ValueBarriers().WaitFull(RingAt<Tr>(tile)); }
  __device__ __forceinline__ void ReleaseKeys(uint32_t tile) const {
    shared.KeyBarriers().Release(TileAt<Tr::KEY_STAGES>(tile).stage, 1);
  }
  __device__ __forceinline__ void ReleaseValues(uint32_t tile) const {
    shared.ValueBarriers().Release(RingAt<Tr>(tile).stage, 1);
  }

  /// Load the A fragments of the warp's 16 rows: lane l of matrix l / 8 has row l % 8 (plus 8), 16 bytes.
  __device__ __forceinline__ void LoadQuery(Query& q) const {
    const int lane = threadIdx.x % 32, row = 64 * group + int(threadIdx.x) % WARPGROUP / 32 * 16 + lane % 16;
    const uint32_t from = shared.Query() + hopper::Swizzle128(row * hopper::SLAB_ROW_BYTES + lane / 16 * 16);
#pragma unroll
    for (int i = 0; i < QK_PRODUCTS; ++i) ptx::LdMatrix(q[i], from ^ (i * hopper::WGMMA_K_BYTES));
  }

  /// Complete a descriptor from its low word, which has the address: sums of it need no carry.
  static __device__ __forceinline__ uint64_t Descriptor(uint32_t low) {
    return hopper::DescriptorKMajor(0) >> 32 << 32 | low;
  }

  /// s = queries of the warpgroup times keys, whose descriptor has the low word `k`.
  __device__ __forceinline__ void IssueScores(Scores& s, const Query& q, uint32_t k) const {
    ptx::WgmmaPin(s);
    ptx::WgmmaFence();
#pragma unroll
    for (int i = 0; i < QK_PRODUCTS; ++i) {
      const int slab = i / 4, byte = i % 4 * hopper::WGMMA_K_BYTES;
      const uint64_t at = Descriptor(k + (slab * (Tr::KEYS * hopper::SLAB_ROW_BYTES) + byte) / 16);
      if constexpr (HOLDS_QUERY) {
        ptx::Wgmma<TYPE, Tr::KEYS>::Run(s, q[i], at, i > 0);
      } else {
        const uint64_t rows = hopper::DescriptorKMajor(shared.Query() + group * (64 * hopper::SLAB_ROW_BYTES));
        ptx::Wgmma<TYPE, Tr::KEYS>::Run(
            s, hopper::AdvanceDescriptor(rows, slab * (Tr::TILE * hopper::SLAB_ROW_BYTES) + byte), at, i > 0);
      }
    }
    ptx::WgmmaCommit();
  }

  /// o += weights times values, whose descriptor has the low word `v`.
  __device__ __forceinline__ void IssueValues(Output& o, const Weights& w, uint32_t v) const {
    ptx::WgmmaPin(o);
    ptx::WgmmaFence();
#pragma unroll
    for (int i = 0; i < VO_PRODUCTS; ++i) {
      ptx::Wgmma<TYPE, Tr::D_VO>::Run(o, w[i], Descriptor(v + i * (hopper::WGMMA_K_BYTES / 16)), true);
    }
    ptx::WgmmaCommit();
  }
};

#endif

}  // namespace prefill_sm90
}  // namespace attention
}  // namespace flashinfer
