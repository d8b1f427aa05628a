// SPDX-License-Identifier: Apache-2.0
// Sparse MLA on CUDA, SM80 and later; formulas and parameters in params.h.
//
// A block has 16 or 64 heads of a token (the rows of its products), and all its indices or a part of them, 32 at a time. Their
// rows come to shared memory as numbers of T (load.cuh), keys and values at once:
//   scores    16 x 8 of them are a tile, which a warp multiplies over all columns; they pass through shared memory
//   softmax   a few threads have a row, and its maximum and sum; weights go back to shared memory as T
//   values    each warp has 512 / WARPS columns of all rows in registers
// Rows in shared memory have 16 bytes more than their numbers, so that eight of them begin in different banks. A split token
// leaves its parts in float, which MergeKernel adds.
//   test  pytest tests/mla/test_sparse_mla.py      bench  python benchmarks/bench_sparse_mla.py
#pragma once
#include "../../device/occupancy.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/pdl.cuh"
#include "../common/math.h"
#include "load.cuh"

namespace flashinfer {
namespace sparse_mla {

constexpr int KEYS = 32;  // keys of a step

template <typename T_, Cache CACHE_, bool HAS_ROPE, int M_TILES_>
struct Shape {
  using T = T_;
  static constexpr Cache CACHE = CACHE_;
  static constexpr int M_TILES = M_TILES_, D = D_V + (HAS_ROPE ? D_ROPE : 0);
  static constexpr int ROWS = 16 * M_TILES, WARPS = M_TILES == 1 ? 4 : 8, THREADS = 32 * WARPS;
  static constexpr int COLUMNS = D_V / WARPS, N_TILES = COLUMNS / 8;  // columns and tiles of a warp
  static constexpr int ROW_THREADS = THREADS / ROWS,
                       THREAD_KEYS = KEYS / ROW_THREADS;             // threads of a row and their keys in the softmax
  static constexpr int STAGES = CACHE == Cache::kLikeQuery ? 2 : 1;  // what is converted does not arrive by itself
  static constexpr int PITCH = D * 2 + 16, SCORE_PITCH = (KEYS + 4) * 4, WEIGHT_PITCH = KEYS * 2 + 16;
  static constexpr int Q = 0, K = Q + ROWS * PITCH, SCORES = K + STAGES * KEYS * PITCH;
  static constexpr int WEIGHTS = SCORES + ROWS * SCORE_PITCH, FACTORS = WEIGHTS + ROWS * WEIGHT_PITCH;
  static constexpr int EXISTS = FACTORS + ROWS * 4, BYTES = EXISTS + STAGES * KEYS * 4;
};

/// Copy the keys of indices [first, first + KEYS), and note which exist.
template <typename S>
__device__ __forceinline__ void CopyKeys(const SparseMlaParams& p, uint32_t shared, const int32_t* indices, int first,
                                         int end, int stage) {
  const int lane = int(threadIdx.x) % ROW_LANES;
#pragma unroll
  for (int i = 0; i < KEYS * ROW_LANES / S::THREADS; ++i) {
    const int key = int(threadIdx.x) / ROW_LANES + i * (S::THREADS / ROW_LANES);
    const char* from = RowOf(p, indices, first + key, end);
    CopyRow<S::CACHE, S::D>(shared + S::K + (stage * KEYS + key) * S::PITCH, from, lane);
    if (lane == 0) ptx::StoreShared4(shared + S::EXISTS + (stage * KEYS + key) * 4, from != nullptr);
  }
}

/// Multiply queries and keys: tiles of 16 rows and 8 keys, one or more for each warp.
template <typename S>
__device__ __forceinline__ void Score(uint32_t shared, int stage) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const uint32_t keys = shared + S::K + stage * KEYS * S::PITCH;
#pragma unroll 1
  for (int tile = warp; tile < S::M_TILES * (KEYS / 8); tile += S::WARPS) {
    const int row0 = tile / (KEYS / 8) * 16, key0 = tile % (KEYS / 8) * 8;
    const uint32_t a_lane = shared + S::Q + (row0 + lane % 16) * S::PITCH + lane / 16 * 16;
    const uint32_t b_lane = keys + (key0 + lane % 8) * S::PITCH + lane / 8 * 16;
    float sums[2][4] = {};
#pragma unroll 6
    for (int k = 0; k < S::D / 32; ++k) {  // two steps of 16 columns
      uint32_t a[2][4], b[4];
      ptx::LdMatrix(b, b_lane + k * 64);
      ptx::LdMatrix(a[0], a_lane + k * 64);
      ptx::LdMatrix(a[1], a_lane + k * 64 + 32);
      ptx::Mma<typename S::T>(sums[0], a[0], b[0], b[1]);
      ptx::Mma<typename S::T>(sums[1], a[1], b[2], b[3]);
    }
    const uint32_t to = shared + S::SCORES + (row0 + lane / 4) * S::SCORE_PITCH + (key0 + lane % 4 * 2) * 4;
    ptx::StoreShared8(to, sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]);
    ptx::StoreShared8(to + 8 * S::SCORE_PITCH, sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]);
  }
}

/// Maximum and sum of a row, which its threads know.
struct RowState {
  float maximum = -math::inf, total = 0.f;
};

/// Turn scores into weights, and write the factor of what was summed before.
template <typename S>
__device__ __forceinline__ void Weigh(const SparseMlaParams& p, RowState& state, uint32_t shared, int stage) {
  const int row = int(threadIdx.x) / S::ROW_THREADS, part = int(threadIdx.x) % S::ROW_THREADS;
  float scores[S::THREAD_KEYS], maximum = state.maximum;
#pragma unroll
  for (int i = 0; i < S::THREAD_KEYS; i += 4) {
    const int key = part * S::THREAD_KEYS + i;
    const float4 x = ptx::LoadShared16(shared + S::SCORES + row * S::SCORE_PITCH + key * 4);
    const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool exists = ptx::LoadShared4(shared + S::EXISTS + (stage * KEYS + key + j) * 4) != 0;
      scores[i + j] = exists ? values[j] * p.scale_log2 : -math::inf;
      maximum = fmaxf(maximum, scores[i + j]);
    }
  }
#pragma unroll
  for (int i = S::ROW_THREADS / 2; i > 0; i /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, i));
  const float base = maximum == -math::inf ? 0.f : maximum, factor = ptx::Exp2(state.maximum - base);
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < S::THREAD_KEYS; ++i) total += scores[i] = ptx::Exp2(scores[i] - base);
  const uint32_t to = shared + S::WEIGHTS + row * S::WEIGHT_PITCH + part * S::THREAD_KEYS * 2;
#pragma unroll
  for (int i = 0; i < S::THREAD_KEYS; i += 2) {
    ptx::StoreShared4(to + i * 2, attention::Pack<typename S::T>(scores[i], scores[i + 1]));
  }
  if (part == 0) ptx::StoreShared4(shared + S::FACTORS + row * 4, __float_as_uint(factor));
  state.maximum = maximum;
  state.total = state.total * factor + GroupSum(total, S::ROW_THREADS);
}

/// Add the weighted values to the columns of this warp.
template <typename S>
__device__ __forceinline__ void AddValues(float (&sums)[S::M_TILES][S::N_TILES][4], uint32_t shared, int stage) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
#pragma unroll
  for (int m = 0; m < S::M_TILES; ++m) {
    const uint32_t factors = shared + S::FACTORS + (m * 16 + lane / 4) * 4;
    const float low = __uint_as_float(ptx::LoadShared4(factors)),
                high = __uint_as_float(ptx::LoadShared4(factors + 32));
#pragma unroll
    for (int n = 0; n < S::N_TILES; ++n) {
      sums[m][n][0] *= low, sums[m][n][1] *= low, sums[m][n][2] *= high, sums[m][n][3] *= high;
    }
  }
  const uint32_t weights = shared + S::WEIGHTS + lane % 16 * S::WEIGHT_PITCH + lane / 16 * 16;
  const uint32_t values =
      shared + S::K + (stage * KEYS + lane % 16) * S::PITCH + (warp * S::COLUMNS + lane / 16 * 8) * 2;
#pragma unroll
  for (int k = 0; k < KEYS / 16; ++k) {
    uint32_t a[S::M_TILES][4];
#pragma unroll
    for (int m = 0; m < S::M_TILES; ++m) ptx::LdMatrix(a[m], weights + m * 16 * S::WEIGHT_PITCH + k * 32);
#pragma unroll
    for (int n = 0; n < S::N_TILES; n += 2) {
      uint32_t b[4];
      ptx::LdMatrixTrans(b, values + k * 16 * S::PITCH + n * 16);
#pragma unroll
      for (int m = 0; m < S::M_TILES; ++m) {
        ptx::Mma<typename S::T>(sums[m][n], a[m], b[0], b[1]);
        ptx::Mma<typename S::T>(sums[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

/// Add a sink to the state of a row; return the factor of its sums.
__device__ __forceinline__ float Finish(const SparseMlaParams& p, RowState& state, int head) {
  float factor = p.out_scale;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head] * math::log2e, next = fmaxf(state.maximum, sink);
    const float base = next == -math::inf ? 0.f : next, old = ptx::Exp2(state.maximum - base);
    factor *= old;
    state.total = state.total * old + ptx::Exp2(sink - base);
    state.maximum = next;
  }
  return state.total == 0.f ? 0.f : factor / state.total;
}

__device__ __forceinline__ float LseOf(const RowState& state) {
  return state.total == 0.f ? -math::inf : state.maximum + __log2f(state.total);
}

/// Grid (tokens * tiles of heads, splits).
template <typename S>
__global__ void __launch_bounds__(S::THREADS) Kernel(const __grid_constant__ SparseMlaParams p) {
  using T = typename S::T;
  extern __shared__ __align__(128) char raw[];
  const uint32_t shared = ptx::SharedAddress(raw);
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int tiles = (p.heads + S::ROWS - 1) / S::ROWS;
  const int token = int(blockIdx.x) / tiles, head0 = int(blockIdx.x) % tiles * S::ROWS;
  const int length = LengthOf(p, token), steps_of_all = (length + KEYS - 1) / KEYS;
  const int share = (steps_of_all + p.splits - 1) / p.splits * KEYS;  // indices of a split
  const int first = min(int(blockIdx.y) * share, length), end = min(first + share, length);
  const int32_t* indices = p.indices + token * p.indices_stride;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;

  CopyQueries<T, S::ROWS, S::D, S::PITCH, S::THREADS>(p, shared + S::Q, token, head0);
  RowState state;
  float sums[S::M_TILES][S::N_TILES][4] = {};
  if (S::STAGES == 2) {
    CopyKeys<S>(p, shared, indices, first, end, 0);
    ptx::CopyCommit();
  }
  int stage = 0;
#pragma unroll 1
  for (int j = first; j < end; j += KEYS) {
    if (S::STAGES == 2) {
      CopyKeys<S>(p, shared, indices, j + KEYS, end, stage ^ 1);  // its readers are past the barrier below
      ptx::CopyCommit();
      ptx::CopyWait<1>();
    } else {
      CopyKeys<S>(p, shared, indices, j, end, 0);
    }
    __syncthreads();
    Score<S>(shared, stage);
    __syncthreads();
    Weigh<S>(p, state, shared, stage);
    __syncthreads();
    AddValues<S>(sums, shared, stage);
    __syncthreads();
    if (S::STAGES == 2) stage ^= 1;
  }
  if (S::STAGES == 2) ptx::CopyWait<0>();

  const int row = int(threadIdx.x) / S::ROW_THREADS, head = head0 + row;
  const bool is_split = p.splits > 1;
  const int64_t part = (int64_t(blockIdx.y) * p.tokens + token) * p.heads;  // row of head 0 among the parts
  float factor = 0.f;
  if (head < p.heads) {
    factor = is_split ? (state.total == 0.f ? 0.f : 1.f / state.total) : Finish(p, state, head);
    if (int(threadIdx.x) % S::ROW_THREADS == 0) {
      if (is_split) {
        p.partial_lse[part + head] = LseOf(state);
      } else if (p.lse != nullptr) {
        p.lse[int64_t(token) * p.heads + head] = LseOf(state) * p.lse_scale;
      }
    }
  }
  if (int(threadIdx.x) % S::ROW_THREADS == 0) ptx::StoreShared4(shared + S::FACTORS + row * 4, __float_as_uint(factor));
  __syncthreads();
#pragma unroll
  for (int m = 0; m < S::M_TILES; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int to_row = m * 16 + lane / 4 + half * 8;
      if (head0 + to_row >= p.heads) continue;
      const float scale = __uint_as_float(ptx::LoadShared4(shared + S::FACTORS + to_row * 4));
      const int column = warp * S::COLUMNS + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < S::N_TILES; ++n) {
        const float x = sums[m][n][2 * half] * scale, y = sums[m][n][2 * half + 1] * scale;
        if (is_split) {
          *reinterpret_cast<float2*>(p.partial_o + (part + head0 + to_row) * D_V + column + n * 8) = float2{x, y};
        } else {
          T* out = static_cast<T*>(p.out) + (int64_t(token) * p.heads + head0 + to_row) * D_V;
          *reinterpret_cast<uint32_t*>(out + column + n * 8) = attention::Pack<T>(x, y);
        }
      }
    }
  }
}

constexpr int MERGE_WARPS = 4;

/// Add the parts of the rows, a warp for each. Grid (rows / MERGE_WARPS).
template <typename T>
__global__ void __launch_bounds__(MERGE_WARPS * 32) MergeKernel(const __grid_constant__ SparseMlaParams p) {
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int64_t rows = int64_t(p.tokens) * p.heads, row = int64_t(blockIdx.x) * MERGE_WARPS + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = int(threadIdx.x) % 32;
  RowState state;
  float sums[D_V / 128][4] = {};
  for (int i = 0; i < p.splits; ++i) {
    const float lse = p.partial_lse[i * rows + row];
    if (lse == -math::inf) continue;
    const float next = fmaxf(state.maximum, lse), old = ptx::Exp2(state.maximum - next), weight = ptx::Exp2(lse - next);
    const float* from = p.partial_o + (i * rows + row) * D_V + lane * 4;
#pragma unroll
    for (int v = 0; v < D_V / 128; ++v) {
      const float4 x = *reinterpret_cast<const float4*>(from + v * 128);
      sums[v][0] = sums[v][0] * old + x.x * weight, sums[v][1] = sums[v][1] * old + x.y * weight;
      sums[v][2] = sums[v][2] * old + x.z * weight, sums[v][3] = sums[v][3] * old + x.w * weight;
    }
    state.total = state.total * old + weight;
    state.maximum = next;
  }
  const float factor = Finish(p, state, int(row % p.heads));
#pragma unroll
  for (int v = 0; v < D_V / 128; ++v) {
    const uint2 x = {attention::Pack<T>(sums[v][0] * factor, sums[v][1] * factor),
                     attention::Pack<T>(sums[v][2] * factor, sums[v][3] * factor)};
    *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + row * D_V + v * 128 + lane * 4) = x;
  }
  if (lane == 0 && p.lse != nullptr) p.lse[row] = LseOf(state) * p.lse_scale;
}

/// Return the most shared memory that a block may have.
inline int MostShared() {
  struct Tag {};
  return device::OncePerDevice<Tag>([](int device) {
    int bytes = 0;
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return bytes;
  });
}

template <typename S>
Status LaunchShape(const SparseMlaParams& p, Stream stream) {
  const Status allowed = device::AllowShared<Kernel<S>, S::BYTES>();
  if (allowed != cudaSuccess) return allowed;
  const dim3 grid(unsigned(int64_t(p.tokens) * CeilDiv(p.heads, S::ROWS)), unsigned(p.splits));
  return LaunchShared(Kernel<S>, grid, dim3(S::THREADS), S::BYTES, p.enable_pdl, stream, p);
}

}  // namespace sparse_mla

template <typename T, sparse_mla::Cache CACHE, bool HAS_ROPE>
Status SparseMla(const SparseMlaParams& p, Stream stream) {
  using namespace sparse_mla;
  using Few = Shape<T, CACHE, HAS_ROPE, 1>;
  using Many = Shape<T, CACHE, HAS_ROPE, 4>;  // reads the rows of more than 16 heads once, where they fit
  // Few tokens do not fill the GPU with blocks of many heads; splits were counted for blocks of few.
  const bool is_many = p.heads > Few::ROWS && p.splits == 1 && MostShared() >= Many::BYTES;
  const Status status = is_many ? LaunchShape<Many>(p, stream) : LaunchShape<Few>(p, stream);
  if (status != cudaSuccess || p.splits == 1) return status;
  const int64_t rows = int64_t(p.tokens) * p.heads;
  return Launch(MergeKernel<T>, dim3(unsigned(CeilDiv(rows, MERGE_WARPS))), dim3(MERGE_WARPS * 32), p.enable_pdl,
                stream, p);
}

}  // namespace flashinfer
