// SPDX-License-Identifier: Apache-2.0
// Chunked gated delta rule, second kernel for any GPU from SM80 on: the chunks of a request, one after another.
//
// A block of eight warps has a head of a request; each warp has 16 rows of the state (columns of V) in 64 registers a lane,
// for all chunks. Products are mma.sync, transposed as on SM90 (chunk_sm90/consumer.cuh): each result is, in the registers
// where it lies, the operand A of the next product. Keys, queries, values and the block of the chunk are copied with
// cp.async, into two stages where shared memory has room for them.
//   test  pytest tests/recurrent/test_emulated_gdn_prefill.py -k portable      bench  python benchmarks/bench_gdn_prefill.py
#pragma once
#include "../../ptx/pdl.cuh"
#include "prepare.cuh"
#include "rows.cuh"

namespace flashinfer {
namespace recurrent {

constexpr int SCAN_THREADS = 256;
constexpr int SCAN_KEYS_AT = 0, SCAN_QUERIES_AT = 2 * SLAB_BYTES, SCAN_VALUES_AT = 4 * SLAB_BYTES;
constexpr int SCAN_BLOCK_AT = 6 * SLAB_BYTES;
constexpr int SCAN_STAGE_BYTES = SCAN_BLOCK_AT + 2 * SLAB_BYTES + 1024;  // a multiple of 1024

/// out = S B^T for tokens x keys at `tile` (two slabs), or A B^T for tokens x tokens (one slab), with 16 columns per step.
template <typename T, int STEPS>
__device__ __forceinline__ void MultiplyRows(float (&out)[TOKEN_FLOATS], const uint32_t (&a)[4 * STEPS],
                                             uint32_t tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const uint32_t words[4] = {a[4 * step], a[4 * step + 1], a[4 * step + 2], a[4 * step + 3]};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t b[4];
      ptx::LdMatrix(b, PieceAt(tile, 16 * pair + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
      ptx::Mma<T>(reinterpret_cast<float (&)[4]>(out[8 * pair]), words, b[0], b[1]);
      ptx::Mma<T>(reinterpret_cast<float (&)[4]>(out[8 * pair + 4]), words, b[2], b[3]);
    }
  }
}

/// s += A K for keys of tokens x 128.
template <typename T>
__device__ __forceinline__ void UpdateRows(float (&s)[DIM / 2], const uint32_t (&a)[TOKEN_WORDS], uint32_t keys) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < CHUNK / 16; ++step) {
    const uint32_t words[4] = {a[4 * step], a[4 * step + 1], a[4 * step + 2], a[4 * step + 3]};
#pragma unroll
    for (int pair = 0; pair < DIM / 16; ++pair) {
      uint32_t b[4];
      ptx::LdMatrixTrans(b, PieceAt(keys, 16 * step + lane % 16, 2 * pair + lane / 16));
      ptx::Mma<T>(reinterpret_cast<float (&)[4]>(s[8 * pair]), words, b[0], b[1]);
      ptx::Mma<T>(reinterpret_cast<float (&)[4]>(s[8 * pair + 4]), words, b[2], b[3]);
    }
  }
}

/// X = beta V^T - beta eG (S K^T), in place of `sums`, like Correct, with values and lists in shared memory: registers are
/// scarce here.
template <typename T>
__device__ __forceinline__ void CorrectBy(float (&sums)[TOKEN_FLOATS], uint32_t values, uint32_t lists, int length) {
  const int first = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int tile = 0; tile < 8; tile += 2) {
    uint32_t words[4];
    ptx::LdMatrixTrans(words, values + TilesAt(tile));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 8 * (tile + i / 2) + first, at = 4 * tile + 2 * i;
      const float2 v = UnpackPair<T>(words[i]), beta = ptx::LoadShared8(lists + kBeta * LIST_BYTES + token * 4);
      const float2 decayed = ptx::LoadShared8(lists + kBetaFromStart * LIST_BYTES + token * 4);
      sums[at] = token < length ? beta.x * v.x - decayed.x * sums[at] : 0.f;
      sums[at + 1] = token + 1 < length ? beta.y * v.y - decayed.y * sums[at + 1] : 0.f;
    }
  }
}

/// Begin to copy a chunk of a head, and its block, to a stage.
template <typename T>
__device__ __forceinline__ void CopyChunk(const DeltaParams<T>& p, uint32_t stage, const Chunk& chunk, int head,
                                          const char* block) {
  CopyRows<SCAN_THREADS>(stage + SCAN_KEYS_AT, p.k, p.num_k_heads, head / (p.num_heads / p.num_k_heads), chunk);
  CopyRows<SCAN_THREADS>(stage + SCAN_QUERIES_AT, p.q, p.num_q_heads, head / (p.num_heads / p.num_q_heads), chunk);
  CopyRows<SCAN_THREADS>(stage + SCAN_VALUES_AT, p.v, p.num_v_heads, head / (p.num_heads / p.num_v_heads), chunk);
  for (int i = threadIdx.x; i < BLOCK_BYTES / 16; i += SCAN_THREADS) {
    ptx::CopyAsync16(stage + SCAN_BLOCK_AT + i * 16, block + i * 16, true);
  }
  ptx::CopyCommit();
}

template <typename T, int STAGES>
__global__ void __launch_bounds__(SCAN_THREADS, 1) ScanChunksKernel(const __grid_constant__ DeltaParams<T> p) {
  extern __shared__ __align__(1024) char dynamic[];
  const uint32_t base = ptx::SharedAddress(dynamic), output = base + STAGES * SCAN_STAGE_BYTES;
  const int head = int(blockIdx.x % p.num_heads), number = int(blockIdx.x / p.num_heads);
  const int warp = threadIdx.x / 32, row = 16 * warp, half = warp / 4;
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const Request request = p.RequestOf(number);
  if (request.length == 0) return;
  const int chunks = int((request.length + CHUNK - 1) / CHUNK);
  const char* const blocks = p.blocks + (FirstChunkSlot(number, request.begin) * p.num_heads + head) * BLOCK_BYTES;
  auto copy = [&](int i) {
    const int64_t passed = int64_t(i) * CHUNK;
    const Chunk chunk{number, request.begin + passed, int(min(request.length - passed, int64_t(CHUNK)))};
    CopyChunk(p, base + i % STAGES * SCAN_STAGE_BYTES, chunk, head, blocks + int64_t(i) * p.num_heads * BLOCK_BYTES);
  };
  float s[DIM / 2];
  LoadState(s, p.initial, p.slots[number], head, row);
  copy(0);
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int64_t passed = int64_t(i) * CHUNK;
    const int length = int(min(request.length - passed, int64_t(CHUNK)));
    const bool is_ahead = STAGES > 1 && i + 1 < chunks;
    if (is_ahead) {
      copy(i + 1);
      ptx::CopyWait<1>();
    } else {
      ptx::CopyWait<0>();
    }
    __syncthreads();
    const uint32_t stage = base + i % STAGES * SCAN_STAGE_BYTES, block = stage + SCAN_BLOCK_AT;
    const uint32_t keys = stage + SCAN_KEYS_AT, decays_at = block + BLOCK_DECAYS_AT;
    uint32_t state[STATE_WORDS], plain[TOKEN_WORDS], x[TOKEN_WORDS];
    float sums[TOKEN_FLOATS] = {}, o[TOKEN_FLOATS] = {};
    float2 decays[8];
    RoundPairs<T>(state, s);
    MultiplyRows<T, 8>(sums, state, keys);
    MultiplyRows<T, 8>(o, state, stage + SCAN_QUERIES_AT);
    CorrectBy<T>(sums, stage + SCAN_VALUES_AT + half * SLAB_BYTES, decays_at, length);
    LoadDecays(decays, decays_at);
    ScaleOutput(o, decays, p.scale);
    RoundPairs<T>(x, sums);
    MultiplyRows<T, 4>(sums, x, block);
    const float decay = ptx::LoadShared8(decays_at + (CHUNK - 2) * 4).y;
#pragma unroll
    for (int j = 0; j < DIM / 2; ++j) s[j] *= decay;
    LoadDecays(decays, decays_at + kToEnd * LIST_BYTES);
    RoundDecayed<T>(x, sums, decays);
    UpdateRows<T>(s, x, keys);
    RoundPairs<T>(plain, sums);
    MultiplyRows<T, 4>(o, plain, block + BLOCK_P_AT);
    RoundPairs<T>(plain, o);
    T* const to = p.o + ((request.begin + passed) * p.num_heads + head) * DIM + half * DIM / 2;
    WriteOutput(plain, output + half * SLAB_BYTES, to, int64_t(p.num_heads) * DIM, length);
    if (HAS_TIGHT_TOLERANCE<T> || IsSlow(decay)) {  // the outputs have left their registers
      uint32_t rest[TOKEN_WORDS];
      LoadDecays(decays, decays_at + kToEnd * LIST_BYTES);
      RoundRest<T, true>(rest, x, sums, decays);
      UpdateRows<T>(s, rest, keys);
    }
    __syncthreads();
    if (STAGES == 1 && i + 1 < chunks) copy(i + 1);
    if (p.interval > 0 && passed + CHUNK <= request.length && (passed + CHUNK) % p.interval == 0) {
      StoreState(s, p.checkpoints, p.rows[number] + (passed + CHUNK) / p.interval - 1, head, row);
    }
  }
  if (p.final.data != nullptr) StoreState(s, p.final, p.slots[number], head, row);
}

template <typename T, int STAGES>
Status LaunchScan(const DeltaParams<T>& p, Stream stream) {
  const auto kernel = ScanChunksKernel<T, STAGES>;
  constexpr int BYTES = STAGES * SCAN_STAGE_BYTES + 2 * SLAB_BYTES;
  const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
  if (allowed != cudaSuccess) return allowed;
  const dim3 grid(unsigned(p.requests) * p.num_heads);
  return LaunchShared(kernel, grid, dim3(SCAN_THREADS), BYTES, p.enable_pdl, stream, p);
}

}  // namespace recurrent
}  // namespace flashinfer
