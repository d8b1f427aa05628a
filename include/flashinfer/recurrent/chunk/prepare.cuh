// SPDX-License-Identifier: Apache-2.0
// Chunked gated delta rule, first kernel: everything of a chunk that does not depend on the state, all chunks in parallel.
//
// A block of four warps has one chunk of one key head. Products K K^T and Q K^T, on the tensor cores by 16 rows per warp,
// stay in registers for all heads that share the keys; for each of these heads, or for two at once, follow decays, A, its
// inverse T (inverse.cuh) and P, which are written to the block of the chunk (blocks.h) in the layout of the second kernel.
// Moves 2 x 16 KB in for each key head and 16.5 KB out for each head.
//   test  pytest tests/recurrent/test_emulated_gdn_prefill.py      bench  python benchmarks/bench_gdn_prefill.py
#pragma once
#include <type_traits>

#include "../../device/occupancy.cuh"
#include "../../hopper/smem_tile.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/pdl.cuh"
#include "../../utils.cuh"
#include "blocks.h"
#include "convert.cuh"
#include "inverse.cuh"

namespace flashinfer {
namespace recurrent {

constexpr int PREPARE_THREADS = 128;
constexpr float LEAST_LOG2_DECAY = -64.f;  // smaller decays count as 2^-64: sums over a chunk keep their precision

/// Shared memory for HEADS heads at once. P is staged in the place of the queries, which are products in registers by then,
/// and matrices of two heads take the place of the keys: their queries are never replaced.
template <int HEADS>
struct PrepareShared {
  alignas(1024) char queries[2 * SLAB_BYTES];
  union {
    alignas(1024) char keys[2 * SLAB_BYTES];
    float of_two[2][MATRIX_FLOATS];
  };
  alignas(16) float of_one[HEADS == 1 ? MATRIX_FLOATS : 4];
  alignas(16) float log2_decay[HEADS][CHUNK];  // summed from the start of the chunk
  alignas(16) float beta[HEADS][CHUNK];

  __device__ __forceinline__ float* Matrix(int i) { return HEADS == 1 ? of_one : of_two[i]; }
};

/// Chunk of a request.
struct Chunk {
  int request = -1;  // negative: the slot is not used
  int64_t begin = 0;
  int length = 0;
};

/// Return the chunk, or piece of `size` tokens, in `slot`: that of the last request whose first slot is not larger. Called
/// by all lanes of a warp.
template <typename T>
__device__ __forceinline__ Chunk FindChunk(const DeltaParams<T>& p, int64_t slot, int64_t size = CHUNK) {
  int count = 0;
  for (int base = 0; base < p.requests; base += 32) {
    const int n = base + int(threadIdx.x) % 32;
    const bool begins = n < p.requests && FirstChunkSlot(n, p.RequestOf(n).begin, size) <= slot;
    const uint32_t those = __ballot_sync(~0u, begins);
    count += __popc(those);
    if (those != ~0u) break;
  }
  if (count == 0) return {};
  const Request request = p.RequestOf(count - 1);
  const int64_t passed = (slot - FirstChunkSlot(count - 1, request.begin, size)) * size;
  if (passed >= request.length) return {};
  return {count - 1, request.begin + passed, int(min(request.length - passed, size))};
}

/// Copy the rows of a chunk of one head to two slabs, by THREADS threads; rows after the end become zeros.
template <int THREADS, typename T>
__device__ __forceinline__ void CopyRows(uint32_t to, const T* rows, int heads, int head, const Chunk& chunk) {
  constexpr int PIECES = DIM / 8, STEP = THREADS / PIECES;  // 16 bytes; rows between those of a thread
  static_assert(STEP % 8 == 0, "rows of a thread have one swizzle");
  const int first = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
  const int64_t stride = int64_t(heads) * DIM;
  const T* from = rows + chunk.begin * stride + head * DIM + piece * 8;
  to += piece / 8 * SLAB_BYTES + hopper::Swizzle128(first * 128 + piece % 8 * 16);
#pragma unroll
  for (int i = 0; i < CHUNK / STEP; ++i) {
    const int row = first + i * STEP;
    const bool exists = row < chunk.length;
    ptx::CopyAsync16(to + i * STEP * 128, exists ? from + row * stride : from, exists);
  }
}

/// Return the address of the 16 bytes that this lane gives to ldmatrix, for rows of A or of B and step `step` of K.
__device__ __forceinline__ uint32_t PieceAt(uint32_t slabs, int row, int piece) {
  return slabs + piece / 8 * SLAB_BYTES + hopper::Swizzle128(row * 128 + piece % 8 * 16);
}

/// Multiply 16 rows (of this warp) of COUNT tiles by all keys up to the diagonal: tiles of 8 keys.
template <typename T, int COUNT>
__device__ __forceinline__ void MultiplyKeys(float (&out)[COUNT][8][4], const uint32_t (&rows)[COUNT], uint32_t keys) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
#pragma unroll
    for (int n = 0; n < 8; ++n) out[i][n][0] = out[i][n][1] = out[i][n][2] = out[i][n][3] = 0.f;
  }
#pragma unroll
  for (int step = 0; step < DIM / 16; ++step) {
    uint32_t a[COUNT][4];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      ptx::LdMatrix(a[i], PieceAt(rows[i], 16 * warp + lane % 16, 2 * step + lane / 16));
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (pair > warp) continue;
      uint32_t b[4];
      ptx::LdMatrix(b, PieceAt(keys, 16 * pair + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        ptx::Mma<T>(out[i][2 * pair], a[i], b[0], b[1]);
        ptx::Mma<T>(out[i][2 * pair + 1], a[i], b[2], b[3]);
      }
    }
  }
}

/// Read decays and betas of the chunk and head, sum up the logarithms, and write the decays of the block. Called by a warp.
template <typename T>
__device__ __forceinline__ void SumDecays(const DeltaParams<T>& p, float* log2_decay, float* betas, const Chunk& chunk,
                                          int head, float* decays) {
  const int lane = threadIdx.x % 32;
  float x[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    const bool exists = row < chunk.length;
    const int64_t at = (chunk.begin + row) * p.num_heads + head;
    x[i] = exists && p.g != nullptr ? p.g[at] : 1.f;
    beta[i] = !exists ? 0.f : p.beta != nullptr ? p.beta[at] : 1.f;
  }
  float logs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float log = log2f(x[i]);
    logs[i] = log < LEAST_LOG2_DECAY ? LEAST_LOG2_DECAY : log;  // NaN stays NaN
  }
  float sum = logs[0] + logs[1];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float before = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += before;
  }
  const float before = __shfl_up_sync(~0u, sum, 1), total = __shfl_sync(~0u, sum, 31);
  const float first = (lane == 0 ? 0.f : before) + logs[0];
  *reinterpret_cast<float2*>(log2_decay + 2 * lane) = {first, sum};
  *reinterpret_cast<float2*>(betas + 2 * lane) = {beta[0], beta[1]};
  *reinterpret_cast<float2*>(decays + 2 * lane) = {ptx::Exp2(first), ptx::Exp2(sum)};
  *reinterpret_cast<float2*>(decays + kToEnd * CHUNK + 2 * lane) = {ptx::Exp2(total - first), ptx::Exp2(total - sum)};
  *reinterpret_cast<float2*>(decays + kBeta * CHUNK + 2 * lane) = {beta[0], beta[1]};
  *reinterpret_cast<float2*>(decays + kBetaFromStart * CHUNK + 2 * lane) = {beta[0] * ptx::Exp2(first),
                                                                            beta[1] * ptx::Exp2(sum)};
}

/// Weigh both products by the decays between their tokens: A goes to the matrix, P (16 bits) to its staging place. Rows after
/// the end have beta = 0 and queries of zeros.
template <typename T>
__device__ __forceinline__ void WeighProducts(float* matrix, char* staging, const float* log2_decays,
                                              const float* betas, const float (&kk)[8][4], const float (&qk)[8][4],
                                              float scale) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = 2 * (lane % 4), row = 16 * warp + lane / 4;
  const float log2_decay[2] = {log2_decays[row], log2_decays[row + 8]}, beta[2] = {betas[row], betas[row + 8]};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const uint32_t at = row * 128 + ((n ^ row % 8) << 4) + column * 2;  // Swizzle128
    uint32_t words[2] = {0u, 0u};
    if (n / 2 <= warp) {
      const bool is_diagonal = n / 2 == warp;
      const float2 of_columns = *reinterpret_cast<const float2*>(log2_decays + 8 * n + column);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int above = is_diagonal ? 8 * n + column - row - 8 * h : -CHUNK;  // at the first number; < 0 is below
        const float first = ptx::Exp2(log2_decay[h] - of_columns.x), second = ptx::Exp2(log2_decay[h] - of_columns.y);
        const float strict[2] = {above < 0 ? beta[h] * first * kk[n][2 * h] : 0.f,
                                 above < -1 ? beta[h] * second * kk[n][2 * h + 1] : 0.f};
        *reinterpret_cast<float2*>(matrix + (row + 8 * h) * MATRIX_STRIDE + 8 * n + column) = {strict[0], strict[1]};
        words[h] = PackPair<T>(above <= 0 ? scale * first * qk[n][2 * h] : 0.f,
                               above <= -1 ? scale * second * qk[n][2 * h + 1] : 0.f);
      }
    }
    *reinterpret_cast<uint32_t*>(staging + at) = words[0];
    *reinterpret_cast<uint32_t*>(staging + at + 8 * 128) = words[1];
  }
}

/// Write P as it is staged, and the inverse T without its diagonal, rounded, to the block. A thread has the same columns of some rows.
template <typename T>
__device__ __forceinline__ void WriteBlock(const float* matrix, const char* staging, char* block) {
  constexpr int STEP = PREPARE_THREADS / 8;
  const int first = threadIdx.x / 8, column = (threadIdx.x % 8 ^ first % 8) * 8;
#pragma unroll
  for (int i = 0; i < CHUNK / STEP; ++i) {
    const int row = first + i * STEP, below = row - column;  // columns from `below` on are on the diagonal or above
    uint32_t words[4] = {0u, 0u, 0u, 0u};
    if (below > 0) {
      const float4* const from = reinterpret_cast<const float4*>(matrix + row * MATRIX_STRIDE + column);
      const float4 x = from[0], y = from[1];
      const float t[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = PackPair<T>(2 * w < below ? t[2 * w] : 0.f, 2 * w + 1 < below ? t[2 * w + 1] : 0.f);
      }
    }
    const int at = threadIdx.x + i * PREPARE_THREADS;
    reinterpret_cast<uint4*>(block)[at] = {words[0], words[1], words[2], words[3]};
    reinterpret_cast<uint4*>(block + BLOCK_P_AT)[at] = reinterpret_cast<const uint4*>(staging)[at];
  }
}

/// Blocks of an SM: float16 keeps operands over tokens as sums of two, which spill 16 bytes where four blocks fit.
template <typename T>
constexpr int PREPARE_BLOCKS = std::is_same<T, __half>::value ? 3 : 4;

template <typename T, int HEADS>
__global__ void __launch_bounds__(PREPARE_THREADS, PREPARE_BLOCKS<T>)
    PrepareChunksKernel(const __grid_constant__ DeltaParams<T> p) {
  extern __shared__ __align__(1024) char dynamic[];
  auto& shared = *reinterpret_cast<PrepareShared<HEADS>*>(dynamic);
  const int64_t slot = blockIdx.x / p.num_k_heads;
  const int k_head = int(blockIdx.x % p.num_k_heads), sharing = p.num_heads / p.num_k_heads, warp = threadIdx.x / 32;
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const Chunk chunk = FindChunk(p, slot);
  if (chunk.request < 0) return;
  const uint32_t keys = ptx::SharedAddress(shared.keys), queries = ptx::SharedAddress(shared.queries);
  CopyRows<PREPARE_THREADS>(keys, p.k, p.num_k_heads, k_head, chunk);
  float products[2][8][4];  // keys by keys, queries by keys
  int q_head = -1;
  for (int i = 0; i < sharing; i += HEADS) {
    const int head = k_head * sharing + i, wanted = head / (p.num_heads / p.num_q_heads);
    char* const block = p.blocks + (slot * p.num_heads + head) * BLOCK_BYTES;
    const bool is_new = wanted != q_head;
    if (is_new) {
      CopyRows<PREPARE_THREADS>(queries, p.q, p.num_q_heads, wanted, chunk);
      ptx::CopyCommit();
    }
    if (warp < HEADS) {
      char* const decays = block + warp * BLOCK_BYTES + BLOCK_DECAYS_AT;
      SumDecays(p, shared.log2_decay[warp], shared.beta[warp], chunk, head + warp, reinterpret_cast<float*>(decays));
    }
    if (is_new) ptx::CopyWait<0>();
    __syncthreads();
    if (is_new) {
      MultiplyKeys<T>(products, {keys, queries}, keys);
      q_head = wanted;
      __syncthreads();  // what follows takes the place of the queries, and of the keys
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      WeighProducts<T>(shared.Matrix(h), shared.queries + h * SLAB_BYTES, shared.log2_decay[h], shared.beta[h],
                       products[0], products[1], p.scale);
    }
    __syncthreads();
    InvertUnitLower<std::is_same_v<T, __half>, HEADS>(shared.Matrix(0), [] { __syncthreads(); });
    __syncthreads();
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      WriteBlock<T>(shared.Matrix(h), shared.queries + h * SLAB_BYTES, block + h * BLOCK_BYTES);
    }
    __syncthreads();
  }
}

template <typename T, int HEADS>
Status LaunchPrepare(const DeltaParams<T>& p, Stream stream) {
  constexpr auto KERNEL = PrepareChunksKernel<T, HEADS>;
  constexpr int BYTES = sizeof(PrepareShared<HEADS>);
  const cudaError_t allowed = device::AllowShared<KERNEL, BYTES>();
  if (allowed != cudaSuccess) return allowed;
  const int64_t blocks = FirstChunkSlot(p.requests, p.tokens) * p.num_k_heads;
  return LaunchShared(KERNEL, dim3(unsigned(blocks)), dim3(PREPARE_THREADS), BYTES, p.enable_pdl, stream, p);
}

/// Launch the first kernel. There is at least one token. Two heads at once, where two share queries and keys, wait half as
/// often for barriers.
template <typename T>
Status PrepareChunks(const DeltaParams<T>& p, Stream stream) {
  const bool are_pairs = p.num_q_heads == p.num_k_heads && p.num_heads / p.num_k_heads % 2 == 0;
  return are_pairs ? LaunchPrepare<T, 2>(p, stream) : LaunchPrepare<T, 1>(p, stream);
}

}  // namespace recurrent
}  // namespace flashinfer
