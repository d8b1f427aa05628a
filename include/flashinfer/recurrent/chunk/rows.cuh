// SPDX-License-Identifier: Apache-2.0
// Chunked gated delta rule: what a warp does with its 16 columns of V between the products, for mma and wgmma alike.
//
// A result of 16 columns of V x 64 tokens is 32 floats of a lane, as 8 tiles of 8 tokens: registers 4 tile + {0, 1} are
// column l / 4, tokens 8 tile + 2 (l % 4) + {0, 1}; 4 tile + {2, 3} the same of column l / 4 + 8. Rounded to pairs, four
// tiles are the operand A of a product over 16 tokens each, two of its registers per tile.
#pragma once
#include "../../hopper/smem_tile.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/stmatrix.cuh"
#include "blocks.h"
#include "convert.cuh"

namespace flashinfer {
namespace recurrent {

constexpr int TOKEN_FLOATS = CHUNK / 2;  // per lane, for 16 columns of V x 64 tokens
constexpr int TOKEN_WORDS = CHUNK / 4;   // the same, rounded
constexpr int STATE_WORDS = DIM / 4;     // per lane, for 16 columns of V x 128 keys, rounded

template <typename T, int COUNT>
__device__ __forceinline__ void RoundPairs(uint32_t (&words)[COUNT], const float (&x)[2 * COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) words[i] = PackPair<T>(x[2 * i], x[2 * i + 1]);
}

/// Offset in a slab of 64 tokens x 64 columns of V of the 16 bytes that this lane addresses to move two tiles of 8 tokens,
/// from `tile` on, between memory and registers.
__device__ __forceinline__ uint32_t TilesAt(int tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int token = 8 * tile + lane / 16 * 8 + lane % 8, piece = 2 * warp + lane / 8 % 2;
  return hopper::Swizzle128(token * 128 + piece * 16);
}

/// Load beta V^T of this warp's columns from a slab of values and the list of betas.
template <typename T>
__device__ __forceinline__ void LoadValues(float (&v)[TOKEN_FLOATS], uint32_t slab, uint32_t betas) {
#pragma unroll
  for (int tile = 0; tile < 8; tile += 2) {
    uint32_t words[4];
    ptx::LdMatrixTrans(words, slab + TilesAt(tile));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = UnpackPair<T>(words[i]);
      const float2 beta = ptx::LoadShared8(betas + (8 * (tile + i / 2) + 2 * (threadIdx.x % 4)) * 4);
      v[4 * tile + 2 * i] = beta.x * x.x;
      v[4 * tile + 2 * i + 1] = beta.y * x.y;
    }
  }
}

/// Load the decays of this lane's tokens from a list of 64.
__device__ __forceinline__ void LoadDecays(float2 (&to)[8], uint32_t list) {
#pragma unroll
  for (int tile = 0; tile < 8; ++tile) to[tile] = ptx::LoadShared8(list + (8 * tile + 2 * (threadIdx.x % 4)) * 4);
}

/// X = beta V^T - beta eG (S K^T), in place of `sums`. `decays`: beta eG. Tokens from `length` on, which may belong to another
/// request, become zeros.
__device__ __forceinline__ void Correct(float (&sums)[TOKEN_FLOATS], const float (&values)[TOKEN_FLOATS],
                                        const float2 (&decays)[8], int length) {
#pragma unroll
  for (int i = 0; i < TOKEN_WORDS; ++i) {
    sums[2 * i] = values[2 * i] - decays[i / 2].x * sums[2 * i];
    sums[2 * i + 1] = values[2 * i + 1] - decays[i / 2].y * sums[2 * i + 1];
  }
  if (length == CHUNK) return;
#pragma unroll
  for (int i = 0; i < TOKEN_FLOATS; ++i) {
    if (8 * (i / 4) + 2 * int(threadIdx.x % 4) + i % 2 >= length) sums[i] = 0.f;
  }
}

/// Round U times the decays to the end of the chunk.
template <typename T>
__device__ __forceinline__ void RoundDecayed(uint32_t (&words)[TOKEN_WORDS], const float (&u)[TOKEN_FLOATS],
                                             const float2 (&decays)[8]) {
#pragma unroll
  for (int i = 0; i < TOKEN_WORDS; ++i) {
    words[i] = PackPair<T>(decays[i / 2].x * u[2 * i], decays[i / 2].y * u[2 * i + 1]);
  }
}

/// Round what rounding leaves out of U, times the decays where it is DECAYED.
template <typename T, bool DECAYED>
__device__ __forceinline__ void RoundRest(uint32_t (&rest)[TOKEN_WORDS], const uint32_t (&words)[TOKEN_WORDS],
                                          const float (&u)[TOKEN_FLOATS], const float2 (&decays)[8]) {
#pragma unroll
  for (int i = 0; i < TOKEN_WORDS; ++i) {
    const float2 rounded = UnpackPair<T>(words[i]);
    const float x = DECAYED ? decays[i / 2].x * u[2 * i] : u[2 * i];
    const float y = DECAYED ? decays[i / 2].y * u[2 * i + 1] : u[2 * i + 1];
    rest[i] = PackPair<T>(x - rounded.x, y - rounded.y);
  }
}

/// A chunk adds to the state what rounding leaves out of U, too: with fp16, whose tolerance is below its 11 bits, and where
/// the state hardly decays, because errors pile up in it. Without decays they exceed the tolerance of bf16 after 1,024 tokens;
/// with decays of 1/2 per chunk they reach 0.6 of it, however long the request is.
template <typename T>
constexpr bool HAS_TIGHT_TOLERANCE = std::is_same_v<T, __half>;
__device__ __forceinline__ bool IsSlow(float decay) { return decay > 0.5f; }

/// o *= scale eG
__device__ __forceinline__ void ScaleOutput(float (&o)[TOKEN_FLOATS], const float2 (&decays)[8], float scale) {
#pragma unroll
  for (int i = 0; i < TOKEN_WORDS; ++i) {
    o[2 * i] *= decays[i / 2].x * scale;
    o[2 * i + 1] *= decays[i / 2].y * scale;
  }
}

/// Store tiles of outputs, transposed, to a slab of 64 tokens x 64 columns of V.
__device__ __forceinline__ void StoreTiles(uint32_t slab, const uint32_t (&o)[TOKEN_WORDS]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#pragma unroll
  for (int tile = 0; tile < 8; tile += 2) {
    ptx::StoreMatrix4Transposed(slab + TilesAt(tile), o[2 * tile], o[2 * tile + 1], o[2 * tile + 2], o[2 * tile + 3]);
  }
#else
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int i = 0; i < TOKEN_WORDS; ++i) {
    const int token = 8 * (i / 2) + lane / 4, piece = 2 * warp + i % 2;
    ptx::StoreShared4(slab + hopper::Swizzle128(token * 128 + piece * 16) + lane % 4 * 4, ptx::Transposed(o[i]));
  }
#endif
}

/// Write the outputs of the first `length` tokens: 16 columns of rows that are `stride` apart, the first at `to` (of the
/// slab's 64 columns), by way of a slab of which each warp uses its own columns.
template <typename T>
__device__ __forceinline__ void WriteOutput(const uint32_t (&o)[TOKEN_WORDS], uint32_t slab, T* to, int64_t stride,
                                            int length) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, piece = 2 * warp + lane % 2;
  __syncwarp();
  StoreTiles(slab, o);
  __syncwarp();
  T* row = to + lane / 2 * stride + piece * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i, row += 16 * stride) {
    const int token = 16 * i + lane / 2;
    const float4 x = ptx::LoadShared16(slab + hopper::Swizzle128(token * 128 + piece * 16));
    if (token < length) *reinterpret_cast<float4*>(row) = x;
  }
}

}  // namespace recurrent
}  // namespace flashinfer
