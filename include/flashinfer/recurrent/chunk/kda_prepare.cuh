// SPDX-License-Identifier: Apache-2.0
// Chunked Kimi delta attention, first kernel: everything of a chunk that does not depend on the state (kda_blocks.h).
//
// A block of eight warps has one chunk of one head, a thread two channels of 16 tokens. Products over channels need keys
// times e^(G_i) and e^(-G_j), which overflow, so both are relative to a token R between them:
//
//   rows     e^(G_i - R_I) k_i, e^(G_i - R_I) q_i   I: the 16 tokens of the row, R_I: G of their fourth
//   columns  e^(R_I - G_j) k_j                      of earlier tokens for each later I: at most 1; of the same 16 tokens: those
//                                                   of the first eight with R_I, of the others with G of the twelfth,
//                                                   for which rows of the last eight are stored again
//
// A decay counts as at least 2^-25, which is a unit in the last place of a float beside 1. So no factor exceeds 2^100, and
// where one is less than the smallest number, 2^-126, the product of both is less than 2^-26. (Columns of earlier tokens are
// made of factors that are at most 1, for that reason: by way of the end of their 16 tokens.)
// Moves 48 KB in and 65 KB out for each chunk and head.
//   test  pytest tests/recurrent/test_emulated_kda_prefill.py      bench  python benchmarks/bench_gdn_prefill.py
#pragma once
#include "../../ptx/barrier.cuh"
#include "../../warp.cuh"
#include "kda_blocks.h"
#include "prepare.cuh"

namespace flashinfer {
namespace recurrent {

constexpr int KDA_THREADS = 256, KDA_TOKENS = 16;  // a thread has 16 tokens
constexpr int KDA_PAIRS = DIM / 2, KDA_PARTS = CHUNK / KDA_TOKENS;
constexpr int KDA_COLUMNS =
    6 * KDA_TOKENS;                      // rows of columns for later tokens: of part 0 for 1, 2, 3, of 1 for 2, 3, ...
constexpr int KDA_LATE = KDA_PARTS * 8;  // rows of the last eight tokens of each part
constexpr float KDA_LEAST_LOG2_DECAY = -25.f;

struct KdaPrepareShared {
  alignas(1024) char keys[2 * SLAB_BYTES];           // then columns for their own part
  alignas(1024) char queries[2 * SLAB_BYTES];        // then rows of q
  alignas(1024) char gates[2 * SLAB_BYTES];          // then rows of k
  alignas(1024) char columns[2][KDA_COLUMNS * 128];  // then P
  alignas(1024) char late[2][2][KDA_LATE * 128];     // rows of k, then of q
  alignas(16) float matrix[MATRIX_FLOATS];
  alignas(16) float whole[KDA_PARTS][DIM],
      fourth[KDA_PARTS][DIM];        // log2 of decays over a part, and over four tokens of it
  alignas(16) float norm[2][CHUNK];  // factors of the rows of k and q
  alignas(16) float beta[CHUNK];
};

/// Return log2 of the decay of a channel: `g` as the gate says, `rate` = e^(a_log).
template <KimiDeltaRule::Gate GATE>
__device__ __forceinline__ float Log2Decay(float g, float bias, float rate, float lower_bound) {
  constexpr float LOG2_E = 1.44269504f;
  float x = g;
  if constexpr (GATE == KimiDeltaRule::Gate::kSoftplus) x = -rate * Softplus(g + bias);
  if constexpr (GATE == KimiDeltaRule::Gate::kBounded) x = lower_bound * Sigmoid(rate * (g + bias));
  x *= LOG2_E;
  return x < KDA_LEAST_LOG2_DECAY ? KDA_LEAST_LOG2_DECAY : x;  // NaN stays NaN
}

/// Sum up the log decays of this thread: two channels, `at` bytes from the start of their rows, of the tokens [first, first + 16).
template <KimiDeltaRule::Gate GATE, typename T>
__device__ __forceinline__ void SumLogDecays(float2 (&sums)[KDA_TOKENS], const KdaParams<T>& p, uint32_t gates,
                                             int pair, int first, int length, int head) {
  float2 bias{0.f, 0.f}, sum{0.f, 0.f};
  const float rate = GATE == KimiDeltaRule::Gate::kLogDecay || p.a_log == nullptr ? 1.f : Exp(p.a_log[head]);
  if (GATE != KimiDeltaRule::Gate::kLogDecay && p.dt_bias != nullptr) {
    const int64_t i = int64_t(head) * KDA_PAIRS + pair;
    bias = p.bias_is_float ? static_cast<const float2*>(p.dt_bias)[i]
                           : UnpackPair<T>(static_cast<const uint32_t*>(p.dt_bias)[i]);
  }
#pragma unroll
  for (int i = 0; i < KDA_TOKENS; ++i) {
    const int row = first + i;
    const float2 g =
        UnpackPair<T>(ptx::LoadShared4(gates + pair / 32 * SLAB_BYTES + hopper::Swizzle128(row * 128 + pair % 32 * 4)));
    if (row < length) {
      sum.x += Log2Decay<GATE>(g.x, bias.x, rate, p.lower_bound);
      sum.y += Log2Decay<GATE>(g.y, bias.y, rate, p.lower_bound);
    }
    sums[i] = sum;
  }
}

/// Write factors of the rows of k and q: 1 / |x|, if they are to be normalised, and for q times the scale. A thread has a half
/// of a row.
template <typename T>
__device__ __forceinline__ void NormOfRows(KdaPrepareShared& shared, const KdaParams<T>& p) {
  const int of_query = threadIdx.x / (2 * CHUNK), row = threadIdx.x / 2 % CHUNK, slab = threadIdx.x % 2;
  float sum = 0.f;
  if (p.normalise) {
    const uint32_t from = ptx::SharedAddress(of_query ? shared.queries : shared.keys) + slab * SLAB_BYTES + row * 128;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // in another order in each lane of eight, which are in other banks then
      const float4 x = ptx::LoadShared16(from + (i + threadIdx.x) % 8 * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = UnpackPair<T>(__float_as_uint(reinterpret_cast<const float (&)[4]>(x)[j]));
        sum += pair.x * pair.x + pair.y * pair.y;
      }
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
  }
  if (slab == 0) {
    shared.norm[of_query][row] = (p.normalise ? rsqrtf(sum + 1e-6f) : 1.f) * (of_query ? p.scale : 1.f);
  }
}

/// Write K, Q and R to the block, and rows and columns of the products to shared memory.
template <typename T>
__device__ __forceinline__ void ScaleRows(KdaPrepareShared& shared, char* block, const float2 (&sums)[KDA_TOKENS]) {
  const int pair = threadIdx.x % KDA_PAIRS, part = threadIdx.x / KDA_PAIRS, slab = pair / 32;
  const auto exp2 = [](float2 x) { return float2{ptx::Exp2(x.x), ptx::Exp2(x.y)}; };
  const auto minus = [](float2 x, float2 y) { return float2{x.x - y.x, x.y - y.y}; };
  const auto times = [](float2 x, float2 y) { return float2{x.x * y.x, x.y * y.y}; };
  const auto pack = [](float2 x) { return PackPair<T>(x.x, x.y); };
  float2 total{0.f, 0.f}, base{0.f, 0.f};
  float2 reference[KDA_PARTS];  // R of each part
#pragma unroll
  for (int i = 0; i < KDA_PARTS; ++i) {
    const float2 fourth = reinterpret_cast<const float2*>(shared.fourth[i])[pair];
    const float2 whole = reinterpret_cast<const float2*>(shared.whole[i])[pair];
    reference[i] = {total.x + fourth.x, total.y + fourth.y};
    if (i == part) base = total;
    total = {total.x + whole.x, total.y + whole.y};
  }
  const float2 of[2] = {sums[3], sums[11]};  // sums at the tokens to which the first and the last eight are relative
  float2 own{0.f, 0.f};
#pragma unroll
  for (int i = 0; i < KDA_PARTS; ++i) {
    if (i == part) own = reference[i];
  }
  const float2 from_start = exp2(own);
  if (part == 0) {  // two whole warps
    const float2 decay = exp2(total);
    reinterpret_cast<float2*>(block + KDA_LISTS_AT)[pair] = decay;
    const float slowest = WarpMax(fmaxf(decay.x, decay.y));
    if (pair % 16 == 0) reinterpret_cast<float*>(block + KDA_LISTS_AT + KDA_SLOWEST_AT)[pair / 16] = slowest;
  }
  const uint32_t keys = ptx::SharedAddress(shared.keys), queries = ptx::SharedAddress(shared.queries);
  const uint32_t rows = ptx::SharedAddress(shared.gates), late = ptx::SharedAddress(shared.late);
  const uint32_t columns = ptx::SharedAddress(shared.columns) + slab * KDA_COLUMNS * 128;
  const int first_column = (part == 0 ? 0 : part == 1 ? 3 : 5) * KDA_TOKENS;
  const float2 end = sums[KDA_TOKENS - 1], at_end{base.x + end.x, base.y + end.y};
  const float2 to_end = exp2(minus(total, at_end));
  float2 to_later[KDA_PARTS - 1];
#pragma unroll
  for (int i = 1; i < KDA_PARTS; ++i) to_later[i - 1] = exp2(minus(reference[i], at_end));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int i = 8 * half + j, row = KDA_TOKENS * part + i;
      const uint32_t where = slab * SLAB_BYTES + hopper::Swizzle128(row * 128 + pair % 32 * 4);
      const float norm_k = shared.norm[0][row], norm_q = shared.norm[1][row];
      const float2 k = times(UnpackPair<T>(ptx::LoadShared4(keys + where)), {norm_k, norm_k});
      const float2 q = times(UnpackPair<T>(ptx::LoadShared4(queries + where)), {norm_q, norm_q});
      const float2 grown = exp2(minus(sums[i], of[0]));
      const float2 row_k = times(k, grown), row_q = times(q, grown), column = times(k, exp2(minus(of[half], sums[i])));
      const float2 ending = times(k, exp2(minus(end, sums[i])));  // both factors at most 1
      ptx::StoreShared4(rows + where, pack(row_k));
      ptx::StoreShared4(queries + where, pack(row_q));
      ptx::StoreShared4(keys + where, pack(column));
      *reinterpret_cast<uint32_t*>(block + where) = pack(times(row_k, from_start));
      *reinterpret_cast<uint32_t*>(block + KDA_QUERIES_AT + where) = pack(times(row_q, from_start));
      *reinterpret_cast<uint32_t*>(block + KDA_ADDED_AT + where) = pack(times(ending, to_end));
#pragma unroll
      for (int later = 1; later < KDA_PARTS; ++later) {
        if (later <= part) continue;
        const int to = first_column + (later - part - 1) * KDA_TOKENS + i;
        ptx::StoreShared4(columns + hopper::Swizzle128(to * 128 + pair % 32 * 4),
                          pack(times(ending, to_later[later - 1])));
      }
      if (half == 1) {
        const float2 again = exp2(minus(sums[i], of[1]));
        const uint32_t to = late + slab * KDA_LATE * 128 + hopper::Swizzle128((8 * part + j) * 128 + pair % 32 * 4);
        ptx::StoreShared4(to, pack(times(k, again)));
        ptx::StoreShared4(to + 2 * KDA_LATE * 128, pack(times(q, again)));
      }
    }
  }
}

/// Products of 16 rows, of k and of q, and 16 columns of k.
struct KdaTile {
  int row_part, column_part;
  float of_k[2][4], of_q[2][4];
};

/// Return the address that this lane gives to ldmatrix, of `rows` rows per slab.
__device__ __forceinline__ uint32_t PieceOf(uint32_t slabs, int rows, int row, int piece) {
  return slabs + piece / 8 * rows * 128 + hopper::Swizzle128(row * 128 + piece % 8 * 16);
}

template <typename T>
__device__ __forceinline__ void MultiplyTile(KdaTile& tile, const KdaPrepareShared& shared) {
  const int lane = threadIdx.x % 32, row = KDA_TOKENS * tile.row_part, before = tile.row_part - tile.column_part - 1;
  const bool is_diagonal = before < 0;
  const uint32_t rows_k = ptx::SharedAddress(shared.gates), rows_q = ptx::SharedAddress(shared.queries);
  const uint32_t late = ptx::SharedAddress(shared.late);
  const uint32_t columns = ptx::SharedAddress(is_diagonal ? shared.keys : shared.columns[0]);
  const int column_rows = is_diagonal ? CHUNK : KDA_COLUMNS;
  const int first = tile.column_part == 0 ? 0 : tile.column_part == 1 ? 3 : 5;
  const int column = is_diagonal ? row : (first + before) * KDA_TOKENS;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) tile.of_k[n][i] = tile.of_q[n][i] = 0.f;
  }
#pragma unroll
  for (int step = 0; step < DIM / 16; ++step) {
    uint32_t k[4], q[4], b[4];
    const int piece = 2 * step + lane / 16;
    ptx::LdMatrix(k, PieceAt(rows_k, row + lane % 16, piece));
    ptx::LdMatrix(q, PieceAt(rows_q, row + lane % 16, piece));
    ptx::LdMatrix(b, PieceOf(columns, column_rows, column + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
    ptx::Mma<T>(tile.of_k[0], k, b[0], b[1]);
    ptx::Mma<T>(tile.of_q[0], q, b[0], b[1]);
    if (is_diagonal) {  // the last eight columns: only the last eight rows are below them
      ptx::LdMatrix(k, PieceOf(late, KDA_LATE, 8 * tile.row_part + lane % 8, piece));
      ptx::LdMatrix(q, PieceOf(late + 2 * KDA_LATE * 128, KDA_LATE, 8 * tile.row_part + lane % 8, piece));
    }
    ptx::Mma<T>(tile.of_k[1], k, b[2], b[3]);
    ptx::Mma<T>(tile.of_q[1], q, b[2], b[3]);
  }
}

/// Write A of a tile to the matrix.
__device__ __forceinline__ void WriteA(KdaPrepareShared& shared, const KdaTile& tile) {
  const int lane = threadIdx.x % 32, row = KDA_TOKENS * tile.row_part + lane / 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int column = KDA_TOKENS * tile.column_part + 8 * n + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float beta = shared.beta[row + 8 * h];
      const float x = column < row + 8 * h ? beta * tile.of_k[n][2 * h] : 0.f;
      const float y = column + 1 < row + 8 * h ? beta * tile.of_k[n][2 * h + 1] : 0.f;
      *reinterpret_cast<float2*>(shared.matrix + (row + 8 * h) * MATRIX_STRIDE + column) = {x, y};
    }
  }
}

/// Write P of a tile to its staging place, and zeros to the tile that mirrors it.
template <typename T>
__device__ __forceinline__ void StageP(KdaPrepareShared& shared, const KdaTile& tile) {
  const int lane = threadIdx.x % 32, inside = lane / 4;
  const auto store = [&](int row, int column, uint32_t x) {
    *reinterpret_cast<uint32_t*>(shared.columns[0] + hopper::Swizzle128(row * 128 + column * 2)) = x;
  };
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int in_tile = 8 * n + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = KDA_TOKENS * tile.row_part + inside + 8 * h, column = KDA_TOKENS * tile.column_part + in_tile;
      const float x = column <= row ? tile.of_q[n][2 * h] : 0.f, y = column + 1 <= row ? tile.of_q[n][2 * h + 1] : 0.f;
      store(row, column, PackPair<T>(x, y));
      if (tile.row_part != tile.column_part) {
        store(KDA_TOKENS * tile.column_part + inside + 8 * h, KDA_TOKENS * tile.row_part + in_tile, 0u);
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(KDA_THREADS, 2) PrepareKdaKernel(const __grid_constant__ KdaParams<T> p) {
  extern __shared__ __align__(1024) char dynamic[];
  auto& shared = *reinterpret_cast<KdaPrepareShared*>(dynamic);
  const int64_t slot = blockIdx.x / p.num_heads;
  const int head = int(blockIdx.x % p.num_heads), warp = threadIdx.x / 32;
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const Chunk chunk = FindChunk(p, slot);
  if (chunk.request < 0) return;
  char* const block = p.blocks + (slot * p.num_heads + head) * KDA_BLOCK_BYTES;
  CopyRows<KDA_THREADS>(ptx::SharedAddress(shared.keys), p.k, p.num_k_heads, head / (p.num_heads / p.num_k_heads),
                        chunk);
  CopyRows<KDA_THREADS>(ptx::SharedAddress(shared.queries), p.q, p.num_q_heads, head / (p.num_heads / p.num_q_heads),
                        chunk);
  CopyRows<KDA_THREADS>(ptx::SharedAddress(shared.gates), p.gates, p.num_heads, head, chunk);
  ptx::CopyCommit();
  if (threadIdx.x < CHUNK) {
    const int64_t at = (chunk.begin + threadIdx.x) * p.num_heads + head;
    float beta = 0.f;
    if (int(threadIdx.x) < chunk.length) {
      beta = p.betas_are_float ? static_cast<const float*>(p.betas)[at] : float(static_cast<const T*>(p.betas)[at]);
      if (p.beta_is_logit) beta = Sigmoid(beta);
    }
    shared.beta[threadIdx.x] = beta;
    reinterpret_cast<float*>(block + KDA_LISTS_AT + KDA_BETAS_AT)[threadIdx.x] = beta;
  }
  ptx::CopyWait<0>();
  __syncthreads();
  NormOfRows(shared, p);
  const int pair = threadIdx.x % KDA_PAIRS, part = threadIdx.x / KDA_PAIRS;
  const uint32_t gates = ptx::SharedAddress(shared.gates);
  float2 sums[KDA_TOKENS];
  using Gate = KimiDeltaRule::Gate;
  if (p.gate == Gate::kBounded) {
    SumLogDecays<Gate::kBounded>(sums, p, gates, pair, KDA_TOKENS * part, chunk.length, head);
  } else if (p.gate == Gate::kSoftplus) {
    SumLogDecays<Gate::kSoftplus>(sums, p, gates, pair, KDA_TOKENS * part, chunk.length, head);
  } else {
    SumLogDecays<Gate::kLogDecay>(sums, p, gates, pair, KDA_TOKENS * part, chunk.length, head);
  }
  reinterpret_cast<float2*>(shared.whole[part])[pair] = sums[KDA_TOKENS - 1];
  reinterpret_cast<float2*>(shared.fourth[part])[pair] = sums[3];
  __syncthreads();
  ScaleRows<T>(shared, block, sums);
  __syncthreads();
  // Ten tiles on or below the diagonal: those of the diagonal have a warp each, two warps have two of the others.
  KdaTile tiles[2];
  tiles[0].row_part = warp < 4    ? warp
                      : warp == 4 ? 1
                                  : 3,
  tiles[0].column_part = warp < 4    ? warp
                         : warp == 4 ? 0
                                     : warp - 5;
  tiles[1].row_part = 2, tiles[1].column_part = warp - 4;
  const bool has_two = warp == 4 || warp == 5;
  MultiplyTile<T>(tiles[0], shared);
  WriteA(shared, tiles[0]);
  if (has_two) {
    MultiplyTile<T>(tiles[1], shared);
    WriteA(shared, tiles[1]);
  }
  __syncthreads();
  StageP<T>(shared, tiles[0]);
  if (has_two) StageP<T>(shared, tiles[1]);
  __syncthreads();
  if (warp >= 4) return;
  InvertUnitLower<false, 1>(shared.matrix, [] { ptx::BarrierSync(1, PREPARE_THREADS); });
  ptx::BarrierSync(1, PREPARE_THREADS);
  WriteBlock<T>(shared.matrix, shared.columns[0], block + KDA_MATRICES_AT);
}

/// Launch the first kernel. There is at least one token.
template <typename T>
Status PrepareKda(const KdaParams<T>& p, Stream stream) {
  constexpr auto KERNEL = PrepareKdaKernel<T>;
  constexpr int BYTES = sizeof(KdaPrepareShared);
  const cudaError_t allowed = device::AllowShared<KERNEL, BYTES>();
  if (allowed != cudaSuccess) return allowed;
  const int64_t blocks = FirstChunkSlot(p.requests, p.tokens) * p.num_heads;
  return LaunchShared(KERNEL, dim3(unsigned(blocks)), dim3(KDA_THREADS), BYTES, p.enable_pdl, stream, p);
}

}  // namespace recurrent
}  // namespace flashinfer
