// SPDX-License-Identifier: Apache-2.0
// Few bf16 tokens that a swapped product quantises itself (quantize_1x128.h): the producer warps that would copy block scales
// load 128 columns of the tokens, quantise them, and write codes and scales to the stage. The product then needs no kernel
// before it, which costs a launch and 1.4 us on an H200. Every block quantises all tokens, which its loads of weights hide.
//
// Codes lie where a load through a tensor map would have written them (128-byte swizzle). A warp has the columns of its next
// DEPTH stages in registers or under way, because a load takes as long as several stages.
#pragma once
#include "../../hopper/ring.cuh"
#include "../../hopper/smem_tile.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/tma.cuh"
#include "params.cuh"
#include "../../quantize_1x128.cuh"

namespace flashinfer {
namespace gemm {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Tile list of one problem whose tokens are all in one tile: without the divisions of TileList.
class OneTileOfTokens {
 public:
  __device__ __forceinline__ OneTileOfTokens(const TileParams& p, int) : p_(p) {}

  __device__ __forceinline__ bool Get(int t, Tile& tile) const {
    tile = {true, 0, p_.m, t, 0, 0};
    return t < p_.n_tiles;
  }

 private:
  const TileParams& p_;
};

/// Blocks of 128 columns of up to 4 * ROUNDS tokens, by a warp: 8 lanes have a token, each lane 16 columns. Rows between the
/// last token and the last round are zeros. Further rows are not written: what is in their place affects only results that are
/// not stored.
template <int ROUNDS>
class TokenBlocks {
 public:
  static constexpr int DEPTH = 4;  // blocks that are loaded before they are written

  /// Columns of this lane, and the scale of the weights.
  struct Loaded {
    uint4 raw[ROUNDS][2];
    float weight;
  };

  __device__ __forceinline__ explicit TokenBlocks(const GemmParams& p)
      : stride_(int64_t(p.gathered.stride_chunks) * (STEP * CHUNK_BYTES)), count_(p.tiles.m) {
    const int column = int(threadIdx.x) % LANES * LANE_COLUMNS;
    row_ = int(threadIdx.x) % 32 / LANES;
    from_ = p.gathered.data + int64_t(row_) * p.gathered.stride_chunks * CHUNK_BYTES + column * 2;
    place_ = hopper::Swizzle128(row_ * SLAB_K_BYTES + column);
  }

  /// Load K block `kb`, and the scale at `weight`.
  __device__ __forceinline__ void Load(Loaded& x, int kb, const float* weight) const {
    const char* const from = from_ + kb * (SCALE_BLOCK * 2);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      x.raw[i][0] = x.raw[i][1] = uint4{};
      if (row_ + STEP * i >= count_) continue;
      const auto* const chunks = reinterpret_cast<const uint4*>(from + i * stride_);
      x.raw[i][0] = chunks[0], x.raw[i][1] = chunks[1];
    }
    x.weight = *weight;
  }

  /// Write the codes to the slab at `codes`, the scales of tokens to `scales`, and that of the weights behind TOKENS of them.
  template <int TOKENS>
  __device__ __forceinline__ void Write(const Loaded& x, uint32_t codes, uint32_t scales) const {
    static_assert(TOKENS >= STEP * ROUNDS, "rows of the slab");
    float amax[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) amax[i] = AbsMax16<bfloat16_t>(x.raw[i]);
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i) amax[i] = fmaxf(amax[i], __shfl_xor_sync(~0u, amax[i], offset));
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const float q = amax[i] == 0.f ? 1.f : 448.f / amax[i];
      const uint2 low = Encode8(reinterpret_cast<const bfloat16_t(&)[8]>(x.raw[i][0]), q);
      const uint2 high = Encode8(reinterpret_cast<const bfloat16_t(&)[8]>(x.raw[i][1]), q);
      // Swizzled places of row r + 4 and of row r differ by 4 rows and by bit 2 of the chunk.
      const uint32_t place = (place_ + i * STEP * SLAB_K_BYTES) ^ (i * STEP * CHUNK_BYTES);
      ptx::StoreShared16(codes + place, uint4{low.x, low.y, high.x, high.y});
      if (threadIdx.x % LANES == 0) ptx::StoreShared4(scales + 4 * (row_ + STEP * i), __float_as_uint(1.f / q));
    }
    if (threadIdx.x % 32 == 1) ptx::StoreShared4(scales + 4 * TOKENS, __float_as_uint(x.weight));
  }

 private:
  static constexpr int LANES = QUANTIZE_LANES, STEP = 32 / LANES;  // lanes per token, tokens per round
  static constexpr int LANE_COLUMNS = SCALE_BLOCK / LANES;
  static_assert(LANE_COLUMNS == CHUNK_BYTES && STEP == 4 && ROUNDS <= 2, "a lane writes one chunk of 16 codes");

  const char* from_;  // this lane's columns of its first token
  const int64_t stride_;
  const int count_;
  int row_;
  uint32_t place_;
};

/// Quantise the tokens of the stages that one of Traits::ALTERNATES producer warps has.
template <typename Traits, int ROUNDS, typename ForEach>
__device__ __forceinline__ void ProduceTokenBlocks(const GemmParams& p, const hopper::Ring<Traits::STAGES>& ring,
                                                   uint32_t stages, uint32_t scales, const ForEach& for_each) {
  using Blocks = TokenBlocks<ROUNDS>;
  constexpr int ALTERNATES = Traits::ALTERNATES, DEPTH = Blocks::DEPTH;
  const int first = int(threadIdx.x) / 32 - 1;
  const Blocks blocks(p);
  int offset = first;  // offset of the first K block of this warp in the tile
  for_each(first, [&](const auto& part, hopper::RingPosition<Traits::STAGES>& at) {
    const ScaleView& of_weights = p.weight_scale;
    const float* const weight =
        of_weights.data + part.tile.n_tile * Traits::WEIGHTS / SCALE_BLOCK * of_weights.row_stride;
    typename Blocks::Loaded loaded[DEPTH];
    const auto load = [&](typename Blocks::Loaded& to, int kb) {
      if (kb < part.end) blocks.Load(to, kb, weight + kb * of_weights.k_stride);
    };
    int kb = part.first + offset;
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) load(loaded[i], kb + i * ALTERNATES);
    while (kb < part.end) {
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        if (kb >= part.end) break;
        ring.WaitEmpty(at);
        blocks.template Write<Traits::TOKENS>(loaded[i], stages + at.stage * Traits::STAGE_BYTES + Traits::WEIGHT_BYTES,
                                              scales + at.stage * Traits::SCALE_BYTES);
        ptx::FenceAsyncProxy();  // wgmma reads the codes
        __syncwarp();
        if (threadIdx.x % 32 < hopper::RELEASING_LANES) ptx::MbarrierArrive(ring.Full(at.stage));
        load(loaded[i], kb + DEPTH * ALTERNATES);
        kb += ALTERNATES;
        at.template Skip<ALTERNATES>();
      }
    }
    offset = kb - part.end;
  });
}

#endif

}  // namespace gemm
}  // namespace flashinfer
