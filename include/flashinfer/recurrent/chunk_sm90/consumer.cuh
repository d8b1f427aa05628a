// SPDX-License-Identifier: Apache-2.0
// Chunked gated delta rule on SM90: the products of a warpgroup. Everything is transposed, so that each result is, in the
// registers where it lies, the operand A of the next product (S: 64 x 128, the others 64 columns of V x 64 tokens):
//
//   S K^T                  A = S rounded          B = keys      tokens x K
//   O  = S Q^T             A = S rounded          B = queries
//   X  = V^T - eG (S K^T)
//   U  = X + X (T - I)^T   A = X rounded          B = T - I     tokens x tokens
//   S  = eG_63 S + (eR U) K   A = eR U            B = keys      read MN-major
//   O  = scale eG O + U P^T   A = U               B = P
#pragma once
#include "../../ptx/barrier.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "../chunk/rows.cuh"
#include "passes.h"
#include "shape.h"

namespace flashinfer {
namespace recurrent {
namespace sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename T>
inline constexpr ptx::WgmmaType TYPE_OF = ptx::WgmmaType::kBf16;
template <>
inline constexpr ptx::WgmmaType TYPE_OF<__half> = ptx::WgmmaType::kF16;

template <typename T, typename Shape_>
struct Consumer {
  using Shape = Shape_;
  static constexpr ptx::WgmmaType TYPE = TYPE_OF<T>;

  const Shared<Shape> shared;
  const int group;  // warpgroup

  /// Return `shared` by way of a shuffle: its value is uniform, and descriptors are computed where they are used.
  __device__ __forceinline__ Shared<Shape> Here() const { return {__shfl_sync(~0u, shared.base, 0)}; }

  /// Issue steps [FIRST, FIRST + 4) of out = S B^T for a tile B of tokens x K at `tile`. Four steps are a slab.
  template <int FIRST>
  __device__ __forceinline__ void MultiplyState(float (&out)[TOKEN_FLOATS], const uint32_t (&state)[STATE_WORDS],
                                                uint32_t tile) const {
    const uint64_t b = hopper::DescriptorKMajor(tile + FIRST / 4 * SLAB_BYTES);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int at = 4 * (FIRST + step);
      const uint32_t a[4] = {state[at], state[at + 1], state[at + 2], state[at + 3]};
      ptx::Wgmma<TYPE, CHUNK>::Run(out, a, hopper::AdvanceDescriptor(b, step * hopper::WGMMA_K_BYTES),
                                   FIRST + step > 0);
    }
  }

  /// Issue out += A B^T for a tile B of tokens x tokens.
  __device__ __forceinline__ void MultiplyTokens(float (&out)[TOKEN_FLOATS], const uint32_t (&words)[TOKEN_WORDS],
                                                 uint32_t tile) const {
    const uint64_t b = hopper::DescriptorKMajor(tile);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t a[4] = {words[4 * step], words[4 * step + 1], words[4 * step + 2], words[4 * step + 3]};
      ptx::Wgmma<TYPE, CHUNK>::Run(out, a, hopper::AdvanceDescriptor(b, step * hopper::WGMMA_K_BYTES), true);
    }
  }

  /// Issue s += A K.
  __device__ __forceinline__ void UpdateState(float (&s)[DIM / 2], const uint32_t (&words)[TOKEN_WORDS],
                                              uint32_t keys) const {
    const uint64_t b = hopper::DescriptorMnMajor(keys, CHUNK);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t a[4] = {words[4 * step], words[4 * step + 1], words[4 * step + 2], words[4 * step + 3]};
      ptx::Wgmma<TYPE, DIM, false, true>::Run(s, a, hopper::AdvanceDescriptor(b, step * 16 * hopper::SLAB_ROW_BYTES),
                                              true);
    }
  }

  /// Clear keys of the tokens from `length` on: U is 0 there, and 0 times a NaN of another request would be NaN.
  __device__ __forceinline__ void ClearKeys(int stage, int length) const {
    for (int i = length * 8 + int(threadIdx.x); i < CHUNK * 8; i += Shape::CONSUMERS) {
      ptx::StoreShared16(shared.Keys(stage) + i * 16, uint4{});
      ptx::StoreShared16(shared.Keys(stage) + SLAB_BYTES + i * 16, uint4{});
    }
    ptx::FenceAsyncProxy();
    ptx::BarrierSync(kCleared, Shape::CONSUMERS);
  }

  /// Bytes of the staged outputs of this warp: 64 rows of 16 columns.
  __device__ __forceinline__ uint32_t Staging() const {
    return shared.Output(group) + int(threadIdx.x) % WARPGROUP / 32 * OUTPUT_BOX_BYTES;
  }

  /// Let the next outputs replace those that are being stored.
  __device__ __forceinline__ void WaitStored() const {
    if (threadIdx.x % 32 == 0) ptx::WaitStoresRead<0>();
    __syncwarp();
  }

  /// Stage rounded outputs of 64 tokens.
  __device__ __forceinline__ void StageOutput(const uint32_t (&o)[TOKEN_WORDS]) const {
    const int lane = threadIdx.x % 32;
    const uint32_t at = Staging() + (lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16;
    WaitStored();
#pragma unroll
    for (int tile = 0; tile < 8; tile += 2) {
      ptx::StoreMatrix4Transposed(at + tile * 8 * 32, o[2 * tile], o[2 * tile + 1], o[2 * tile + 2], o[2 * tile + 3]);
    }
  }

  /// Store the staged outputs of 64 tokens with TMA.
  __device__ __forceinline__ void StoreStaged(const Maps& maps, int column, int head, int64_t token) const {
    ptx::FenceAsyncProxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      ptx::StoreBox(&maps.o, Staging(), column, head, int(token));
      ptx::CommitStores();
    }
  }

  /// Store the first `length` of the staged outputs: what follows belongs to another request.
  __device__ __forceinline__ void StoreRows(const DeltaParams<T>& p, int column, int head, int64_t token,
                                            int length) const {
    const int lane = threadIdx.x % 32;
    T* const to = p.o + (token * p.num_heads + head) * DIM + column + lane % 2 * 8;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * i + lane / 2;
      const float4 x = ptx::LoadShared16(Staging() + row * 32 + lane % 2 * 16);
      if (row < length) *reinterpret_cast<float4*>(to + int64_t(row) * p.num_heads * DIM) = x;
    }
  }
};

/// Set rows [row, row + 16) of the identity.
__device__ __forceinline__ void SetIdentity(float (&s)[DIM / 2], int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < DIM / 2; ++i) {
    s[i] = row + lane / 4 + i / 2 % 2 * 8 == i / 4 * 8 + 2 * (lane % 4) + i % 2 ? 1.f : 0.f;
  }
}

/// Multiply the state by decays of key channels.
__device__ __forceinline__ void DecayChannels(float (&s)[DIM / 2], uint32_t decays) {
#pragma unroll
  for (int j = 0; j < DIM / 8; ++j) {
    const float2 decay = ptx::LoadShared8(decays + (8 * j + 2 * (threadIdx.x % 4)) * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[4 * j + i] *= i % 2 == 0 ? decay.x : decay.y;
  }
}

/// Compute all chunks of the item, of which there is at least one. Each group of products has other work in its shadow: the
/// chain of a chunk is S K^T, X, U, eR U, S. Pass::kTransfer: no outputs, and states that begin with zeros or, in odd blocks,
/// with the identity and no values.
template <typename T, typename Shape, Pass PASS>
__device__ __forceinline__ void Consume(const DeltaParams<T>& p, const Maps& maps, const Item& item,
                                        const Shared<Shape>& shared) {
  const int warp = threadIdx.x / 32, group = warp / 4, row = item.column + 16 * warp;
  const Consumer<T, Shape> c{shared, group};
  constexpr bool TRANSFER = PASS == Pass::kTransfer;
  constexpr bool OF_CHANNELS =
      Shape::CHANNEL_DECAY;  // operands are decayed already, and tokens after the end are zeros
  // What rounding leaves out of U: parts of few heads add it in any case, because the branch spills there.
  constexpr bool ALL_RESTS = !OF_CHANNELS && (HAS_TIGHT_TOLERANCE<T> || PASS == Pass::kParts);
  const auto ring = shared.Ring();
  const int chunks = item.Chunks();
  float s[DIM / 2];
  LoadState(s, item.initial, item.initial_slot, item.head, row);
  if (TRANSFER && blockIdx.x % 2 == 1) SetIdentity(s, row);
  uint32_t state[STATE_WORDS], rounded[TOKEN_WORDS] = {};  // the state, and outputs of the chunk before, in 16 bits
  RoundPairs<T>(state, s);
  hopper::RingPosition<Shape::STAGES> at;
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int64_t passed = int64_t(i) * CHUNK;
    const int length = int(min(item.tokens.length - passed, int64_t(CHUNK))), stage = at.stage;
    const Shared<Shape> here = c.Here();
    const uint32_t lists = shared.Lists(stage), betas = lists + (OF_CHANNELS ? KDA_BETAS_AT : kBeta * LIST_BYTES);
    uint32_t plain[TOKEN_WORDS], x[TOKEN_WORDS], rest[TOKEN_WORDS];
    float sums[TOKEN_FLOATS], o[TOKEN_FLOATS], values[TOKEN_FLOATS];
    float2 decays[8], ends[8];

    if constexpr (OF_CHANNELS) {
      if (p.keeps_starts && p.interval > 0 && passed % p.interval == 0) {
        StoreState(s, p.checkpoints, p.kept_slots[p.rows[item.number] + passed / p.interval], item.head, row);
      }
    }
    ring.WaitFull(at);
    if (!OF_CHANNELS && length < CHUNK) c.ClearKeys(stage, length);
    ptx::WgmmaFence();
    c.template MultiplyState<0>(sums, state, here.Keys(stage));
    c.template MultiplyState<4>(sums, state, here.Keys(stage));
    ptx::WgmmaCommit();
    if constexpr (!TRANSFER) c.template MultiplyState<0>(o, state, here.Queries(stage));
    ptx::WgmmaCommit();
    float decay;  // decay of the state over the chunk, in its slowest channel
    if constexpr (OF_CHANNELS) {
      const float4 slowest = ptx::LoadShared16(lists + KDA_SLOWEST_AT);
      decay = fmaxf(slowest.x, slowest.z);
    } else {
      decay = ptx::LoadShared8(lists + (CHUNK - 2) * 4).y;
    }
    if constexpr (!TRANSFER) {
      if (i > 0) c.StageOutput(rounded);
    }
    LoadValues<T>(values, shared.Values(stage, group), betas);
    LoadDecays(decays, OF_CHANNELS ? betas : lists + kBetaFromStart * LIST_BYTES);
    if (TRANSFER && blockIdx.x % 2 == 1) {
#pragma unroll
      for (int j = 0; j < TOKEN_FLOATS; ++j) values[j] = 0.f;
    }
    ptx::WgmmaPin(values);

    ptx::WgmmaWait<1>();
    ptx::WgmmaPin(sums);
    Correct(sums, values, decays, length);
    RoundPairs<T>(x, sums);
    ptx::WgmmaPin(sums);
    ptx::WgmmaFence();
    c.MultiplyTokens(sums, x, here.Block(stage));
    ptx::WgmmaCommit();
    if constexpr (!TRANSFER) {
      c.template MultiplyState<4>(o, state, here.Queries(stage));
      ptx::WgmmaCommit();
      if (i > 0) c.StoreStaged(maps, row, item.head, item.tokens.begin + passed - CHUNK);
    }
    if constexpr (OF_CHANNELS) {
      DecayChannels(s, lists);
    } else {
      LoadDecays(ends, lists + kToEnd * LIST_BYTES);
#pragma unroll
      for (int j = 0; j < DIM / 2; ++j) s[j] *= decay;
    }
    ptx::WgmmaPin(s);

    ptx::WgmmaWait<TRANSFER ? 0 : 1>();
    ptx::WgmmaPin(sums);
    ptx::WgmmaPin(x);
    if constexpr (OF_CHANNELS) {
      RoundPairs<T>(x, sums);
    } else {
      RoundDecayed<T>(x, sums, ends);
    }
    ptx::WgmmaFence();
    c.UpdateState(s, x, here.Added(stage));
    if constexpr (ALL_RESTS) {
      RoundRest<T, true>(rest, x, sums, ends);
      ptx::WgmmaFence();
      c.UpdateState(s, rest, here.Added(stage));
    }
    ptx::WgmmaCommit();
    if constexpr (!ALL_RESTS) {
      if (IsSlow(decay)) {  // with other products unfinished, ptxas would serialise those of the branch
        RoundRest<T, !OF_CHANNELS>(rest, x, sums, ends);
        ptx::WgmmaFence();
        c.UpdateState(s, rest, here.Added(stage));
        ptx::WgmmaCommit();
        ptx::WgmmaWait<0>();
        ptx::WgmmaPin(s);
        ptx::WgmmaPin(rest);
      }
    }
    if constexpr (!TRANSFER) {
      RoundPairs<T>(plain, sums);
      if constexpr (!OF_CHANNELS) LoadDecays(decays, lists);
      ptx::WgmmaWait<1>();
      ptx::WgmmaPin(o);
      ptx::WgmmaPin(state);
      if constexpr (!OF_CHANNELS) ScaleOutput(o, decays, p.scale);
      ptx::WgmmaFence();
      c.MultiplyTokens(o, plain, here.Block(stage) + BLOCK_P_AT);
      ptx::WgmmaCommit();
    }
    ptx::WgmmaWait<TRANSFER ? 0 : 1>();
    ptx::WgmmaPin(s);
    ptx::WgmmaPin(x);
    if constexpr (ALL_RESTS) ptx::WgmmaPin(rest);
    if constexpr (TRANSFER) ptx::WgmmaPin(state);
    RoundPairs<T>(state, s);
    if constexpr (!TRANSFER) {
      ptx::WgmmaWait<0>();
      ptx::WgmmaPin(o);
      ptx::WgmmaPin(plain);
      RoundPairs<T>(rounded, o);
    }
    __syncwarp();
    ring.Release(stage, 1);
    at.Advance();
    if constexpr (!TRANSFER) {
      const int64_t done = item.passed + passed + CHUNK;
      if (p.interval > 0 && length == CHUNK && done % p.interval == 0 && !(OF_CHANNELS && p.keeps_starts)) {
        const int64_t kept = p.rows[item.number] + done / p.interval - 1;
        StoreState(s, p.checkpoints, OF_CHANNELS ? p.kept_slots[kept] : kept, item.head, row);
      }
    }
  }
  if constexpr (!TRANSFER) {
    const int64_t passed = int64_t(chunks - 1) * CHUNK, left = item.tokens.length - passed;
    c.StageOutput(rounded);
    if (left == CHUNK) {
      c.StoreStaged(maps, row, item.head, item.tokens.begin + passed);
    } else {
      c.StoreRows(p, row, item.head, item.tokens.begin + passed, int(left));
    }
  }
  if (item.final.data != nullptr) StoreState(s, item.final, item.final_slot, item.head, row);
  if constexpr (!TRANSFER) c.WaitStored();
}

#endif

}  // namespace sm90
}  // namespace recurrent
}  // namespace flashinfer
