// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters of experts on CUDA; parameters in lora.h. Bound by reading the matrices, few pairs by latency.
//
//   BgmvShrinkKernel       a warp has ROWS rows of A and reads x once for them, 8 elements per lane and step: one row in
//                          calls of few pairs, so that all SMs have some, and four else
//   BgmvExpandPairsKernel  a block has one pair, a thread one or four rows of B                      not finalize
//   BgmvExpandKernel       a block has one token and lists its pairs, a thread has one row of B      finalize
//   BgmvExpandFewKernel    the same with 32 columns per block, whose warps share the pairs           finalize
//
// Addresses are known on the device only, so a warp (a thread) looks whether its matrix is aligned to 16 bytes, and
// reads single elements otherwise. What is added has one order, whichever kernel does it and however it finds the
// pairs: columns of a lane ascending and then the lanes; ranks ascending; pairs ascending. So results are the same bits
// at each call, and for a token they do not depend on the others.
//   test  pytest tests/fused_moe/test_bgmv_moe.py      bench  python benchmarks/bench_bgmv_moe.py
#pragma once
#include "lora.h"
#include "../ptx/pdl.cuh"
#include "../utils.cuh"
#include "../vec_dtypes.cuh"

namespace flashinfer {
namespace bgmv {

constexpr int VEC = 8;                // elements of 16 bytes
constexpr int THREADS = 128;          // threads of a block, except where pairs are few
constexpr int FEW_ROWS = 4096;        // up to so many rows of A each has a block of one warp: two rounds of an H200
constexpr int FEW_BLOCKS = 132;       // so many blocks of 128 columns or fewer leave SMs of an H200 idle
constexpr int LATENCY_BLOCKS = 2048;  // with more blocks of 128 columns and one pair, a block has 512 columns
constexpr int FEW_WARPS = 8;          // warps of BgmvExpandFewKernel, which share the pairs of a token
constexpr int FEW_PAIRS = 32;         // pairs whose products its shared memory holds
constexpr int LISTED = 512;           // pairs of which those of a token are listed at once

__device__ __forceinline__ float NumberAt(const BgmvNumbers& x, int64_t i) {
  switch (x.type) {
    case BgmvFloat::kFloat:
      return static_cast<const float*>(x.data)[i];
    case BgmvFloat::kHalf:
      return ToFloat(static_cast<const __half*>(x.data)[i]);
    default:
      return ToFloat(static_cast<const __nv_bfloat16*>(x.data)[i]);
  }
}

__device__ __forceinline__ void SetNumber(const BgmvNumbers& x, int64_t i, float value) {
  switch (x.type) {
    case BgmvFloat::kFloat:
      static_cast<float*>(x.data)[i] = value;
      break;
    case BgmvFloat::kHalf:
      static_cast<__half*>(x.data)[i] = FromFloat<__half>(value);
      break;
    default:
      static_cast<__nv_bfloat16*>(x.data)[i] = FromFloat<__nv_bfloat16>(value);
  }
}

__device__ __forceinline__ bool IsVector(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

/// Add the products of N elements per lane and step to the sums of up to ROWS rows, with STEPS steps in flight.
template <typename W, int N, int ROWS, int STEPS>
__device__ __forceinline__ void AddRows(const W* x, const W* matrix, int64_t columns, int rows, float (&sums)[ROWS]) {
  for (int64_t first = int64_t(threadIdx.x % 32) * N; first < columns; first += 32 * N * STEPS) {
    Vec<W, N> a[STEPS], b[STEPS][ROWS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int64_t column = first + s * 32 * N;
      a[s] = column < columns ? Vec<W, N>::Load(x + column) : Vec<W, N>::Zero();
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        b[s][i] = column < columns && i < rows ? Vec<W, N>::Load(matrix + i * columns + column) : Vec<W, N>::Zero();
      }
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if (first + s * 32 * N >= columns) break;
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < N; ++j) sums[i] = fmaf(a[s].Float(j), b[s][i].Float(j), sums[i]);
      }
    }
  }
}

/// Kernel: block (x: pair, y: ROWS rows of A for each warp, z: slice).
template <typename W, int ROWS, int STEPS>
__global__ void __launch_bounds__(THREADS) BgmvShrinkKernel(const __grid_constant__ BgmvShrinkParams p) {
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int64_t pair = blockIdx.x, row = p.Row(pair);
  const W* matrix = p.by.template Matrix<W>(blockIdx.z, pair);
  const bool is_skipped = matrix == nullptr || row < 0;
  if (is_skipped && !(p.overwrites && p.by.IsPair(pair))) return;
  const int64_t first = (int64_t(blockIdx.y) * (blockDim.x / 32) + threadIdx.x / 32) * ROWS;
  if (first >= p.rank) return;
  const int rows = int(min(int64_t(ROWS), p.rank - first));
  const W* const x = static_cast<const W*>(p.x) + row * p.x_stride;
  matrix += first * p.columns;
  float sums[ROWS] = {};
  if (is_skipped) {  // zeros, which the second product may read
  } else if (p.columns % VEC == 0 && IsVector(x) && IsVector(matrix)) {
    AddRows<W, VEC, ROWS, STEPS>(x, matrix, p.columns, rows, sums);
  } else {
    AddRows<W, 1, ROWS, STEPS>(x, matrix, p.columns, rows, sums);
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float sum = GroupSum(sums[i], 32);
    const int64_t at = (int64_t(blockIdx.z) * p.by.pairs + pair) * p.rank + first + i;
    if (threadIdx.x % 32 == 0 && i < rows) SetNumber(p.y, at, p.overwrites ? sum : NumberAt(p.y, at) + sum);
  }
}

constexpr int NUMBERS = 64;  // numbers of x that a warp keeps in shared memory: those of one step

/// Multiply the warp's columns of N matrices by numbers of x, which begin at `at[i]`; the first `count` matrices exist.
/// A lane has the row of B that is `offset[i]` elements into matrix i, or none if that is negative. All lanes come here
/// with the same matrices. V vectors of each row are in flight, and with them their numbers of x.
template <int N, int V, typename W>
__device__ __forceinline__ void Multiply(const BgmvExpandParams& p, const W* const (&matrices)[N],
                                         const int64_t (&offset)[N], const int64_t (&at)[N], int count,
                                         float (&numbers)[NUMBERS], float (&dots)[N]) {
  constexpr int PART = V * VEC;  // numbers of a step for each matrix
  static_assert(N * PART == NUMBERS, "a step fills the shared memory");
  const int rank = int(p.rank), lane = threadIdx.x % 32;
  bool is_vector = rank % VEC == 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    dots[i] = 0.f;
    is_vector = is_vector && (i >= count || IsVector(matrices[i]));
  }
  if (!is_vector) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i >= count || offset[i] < 0) continue;
#pragma unroll 4
      for (int r = 0; r < rank; ++r) {
        dots[i] = fmaf(ToFloat(matrices[i][offset[i] + r]), NumberAt(p.x, at[i] + r), dots[i]);
      }
    }
    return;
  }
#pragma unroll 1
  for (int first = 0; first < rank; first += PART) {
    Vec<W, VEC> w[N][V];
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const bool exists = first + v * VEC < rank && i < count && offset[i] >= 0;
        w[i][v] = exists ? Vec<W, VEC>::Load(matrices[i] + offset[i] + first + v * VEC) : Vec<W, VEC>::Zero();
      }
    }
    float staged[NUMBERS / 32];
#pragma unroll
    for (int k = 0; k < NUMBERS / 32; ++k) {
      const int n = lane + k * 32, i = n / PART, r = first + n % PART;
      int64_t from = at[0];
#pragma unroll
      for (int j = 1; j < N; ++j) from = i == j ? at[j] : from;  // no array with an index: that would be local memory
      const bool exists = i < count && r < rank;
      if (p.x.type == BgmvFloat::kFloat) {  // loads of both that do not wait for each other
        staged[k] = exists ? static_cast<const float*>(p.x.data)[from + r] : 0.f;
      } else {
        staged[k] = exists ? NumberAt(p.x, from + r) : 0.f;
      }
    }
    __syncwarp();  // the last numbers were read
#pragma unroll
    for (int k = 0; k < NUMBERS / 32; ++k) numbers[lane + k * 32] = staged[k];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i >= count) break;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (first + v * VEC >= rank) break;
        float x[VEC];
        LoadFloats(numbers + i * PART + v * VEC, x);
#pragma unroll
        for (int j = 0; j < VEC; ++j) dots[i] = fmaf(w[i][v].Float(j), x[j], dots[i]);
      }
    }
  }
}

/// Write one sum of a row of y.
__device__ __forceinline__ void Store(const BgmvExpandParams& p, int64_t row, int64_t slice, int64_t column,
                                      bool is_served, float sum) {
  if (column >= p.Width(slice) || (!is_served && !p.overwrites)) return;
  const int64_t to = p.ColumnOf(slice, column), at = row * p.y_stride + to;
  if (to < 0 || to >= p.y_columns) return;  // `slice_starts` that nobody has looked at
  const float scaled = is_served && column < p.columns ? p.scale * sum : 0.f;
  SetNumber(p.y, at, p.finalize && !p.overwrites ? fmaf(p.scale, sum, NumberAt(p.y, at)) : scaled);
}

/// Kernel: block (x: pair, y: COLUMNS * 128 columns, z: slice).
template <typename W, int COLUMNS>
__global__ void __launch_bounds__(THREADS, 5) BgmvExpandPairsKernel(const __grid_constant__ BgmvExpandParams p) {
  __shared__ __align__(16) float numbers[THREADS / 32][NUMBERS];
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int64_t pair = blockIdx.x, slice = blockIdx.z;
  const int64_t first = int64_t(blockIdx.y) * COLUMNS * THREADS + threadIdx.x;
  const W* const matrix = p.by.template Matrix<W>(slice, pair);
  const W* matrices[COLUMNS];
  int64_t offset[COLUMNS], at[COLUMNS];
  float dots[COLUMNS] = {};
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    const int64_t column = first + i * THREADS;
    matrices[i] = matrix;
    offset[i] = column < p.columns ? column * p.rank : -1;
    at[i] = slice * p.x_slice_stride + pair * p.rank;
  }
  if (matrix != nullptr) {
    Multiply<COLUMNS, 8 / COLUMNS>(p, matrices, offset, at, COLUMNS, numbers[threadIdx.x / 32], dots);
  }
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) Store(p, pair, slice, first + i * THREADS, matrix != nullptr, dots[i]);
}

/// Pairs of a token that are not skipped, in shared memory.
template <typename W>
struct ServedPairs {
  const W* matrices[LISTED];
  int32_t pairs[LISTED];
  float weights[LISTED];
  int counts[32];  // pairs that each warp found
};

/// Range of pairs that has those of a token.
struct Candidates {
  int64_t begin, end, lora;
  bool is_searched;  // those of other tokens are among them
};

__device__ __forceinline__ Candidates CandidatesOf(const BgmvExpandParams& p, int64_t token) {
  const int64_t number = p.by.lora_ids[token], lora = p.by.IsLora(number) ? number : -1;
  if (p.order != nullptr) return {p.offsets[token], p.offsets[token + 1], lora, false};
  if (!p.by.token_ids.exists()) return {token * p.by.top_k, (token + 1) * p.by.top_k, lora, false};
  return {0, p.by.pairs, lora, true};
}

/// List the pairs of a token that are not skipped among LISTED candidates from `begin` on, and return their number.
/// Other threads may read the last list until all have come here.
template <int BLOCK, typename W>
__device__ __forceinline__ int List(const BgmvExpandParams& p, int64_t token, int64_t slice, const Candidates& among,
                                    int64_t begin, ServedPairs<W>& served) {
  constexpr int STEPS = LISTED / BLOCK, WARPS = BLOCK / 32;
  static_assert(STEPS * BLOCK == LISTED, "a block covers the list in whole steps");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t pairs[STEPS], tokens[STEPS];
  const W* matrices[STEPS];
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    const int64_t i = begin + (warp * STEPS + s) * 32 + lane;
    tokens[s] = i >= among.end ? -1 : among.is_searched ? p.by.token_ids[i] : token;
    pairs[s] = i < among.end && p.order != nullptr ? p.order[i] : i;
  }
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    matrices[s] = tokens[s] == token ? p.by.template MatrixOf<W>(slice, pairs[s], among.lora) : nullptr;
  }
  unsigned votes[STEPS];
  int count = 0;
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    votes[s] = __ballot_sync(~0u, matrices[s] != nullptr);
    count += __popc(votes[s]);
  }
  if (lane == 0) served.counts[warp] = count;
  __syncthreads();
  int total = 0, place = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    if (w == warp) place = total;
    total += served.counts[w];
  }
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    if (matrices[s] != nullptr) {
      const int to = place + __popc(votes[s] & ((1u << lane) - 1));
      served.matrices[to] = matrices[s];
      served.pairs[to] = int32_t(pairs[s]);
      served.weights[to] = p.weights == nullptr ? 1.f : p.weights[pairs[s]];
    }
    place += __popc(votes[s]);
  }
  __syncthreads();
  return total;
}

/// Kernel: block (x: token, y: 128 columns, z: slice). Each thread has PAIRS pairs in flight.
template <typename W>
__global__ void __launch_bounds__(THREADS, 5) BgmvExpandKernel(const __grid_constant__ BgmvExpandParams p) {
  constexpr int PAIRS = 4;
  __shared__ ServedPairs<W> served;
  __shared__ __align__(16) float numbers[THREADS / 32][NUMBERS];
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int64_t token = blockIdx.x, slice = blockIdx.z, column = int64_t(blockIdx.y) * THREADS + threadIdx.x;
  const Candidates among = CandidatesOf(p, token);
  float sum = 0.f;
  bool is_served = false;
  for (int64_t begin = among.begin; begin < among.end; begin += LISTED) {
    const int count = List<THREADS>(p, token, slice, among, begin, served);
    is_served = is_served || count > 0;
    for (int first = 0; first < count; first += PAIRS) {
      const W* matrices[PAIRS];
      int64_t offset[PAIRS], at[PAIRS];
      float dots[PAIRS];
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        const int listed = min(first + i, count - 1);
        matrices[i] = served.matrices[listed];
        at[i] = slice * p.x_slice_stride + served.pairs[listed] * p.rank;
        offset[i] = column < p.columns ? column * p.rank : -1;
      }
      Multiply<PAIRS, 2>(p, matrices, offset, at, count - first, numbers[threadIdx.x / 32], dots);
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        if (first + i < count) sum = fmaf(served.weights[first + i], dots[i], sum);
      }
    }
    if (among.lora < 0) break;
  }
  Store(p, token, slice, column, is_served, sum);
}

/// Kernel: block (x: token, y: 32 columns, z: slice). A warp has some of the pairs; the first one adds up the products.
template <typename W>
__global__ void __launch_bounds__(FEW_WARPS * 32, 2) BgmvExpandFewKernel(const __grid_constant__ BgmvExpandParams p) {
  __shared__ ServedPairs<W> served;
  __shared__ float products[FEW_PAIRS][32];
  __shared__ __align__(16) float numbers[FEW_WARPS][NUMBERS];
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = blockIdx.x, slice = blockIdx.z, column = int64_t(blockIdx.y) * 32 + lane;
  const int64_t offset[1] = {column < p.columns ? column * p.rank : -1};
  const Candidates among = CandidatesOf(p, token);
  float sum = 0.f;
  bool is_served = false;
  for (int64_t begin = among.begin; begin < among.end; begin += LISTED) {
    const int count = List<FEW_WARPS * 32>(p, token, slice, among, begin, served);
    is_served = is_served || count > 0;
    for (int first = 0; first < count; first += FEW_PAIRS) {
      const int n = min(FEW_PAIRS, count - first);
      if (first > 0) __syncthreads();  // the last products were added
      for (int i = warp; i < n; i += FEW_WARPS) {
        const W* const matrix[1] = {served.matrices[first + i]};
        const int64_t at[1] = {slice * p.x_slice_stride + served.pairs[first + i] * p.rank};
        float dots[1];
        Multiply<1, 8>(p, matrix, offset, at, 1, numbers[warp], dots);
        products[i][lane] = dots[0];
      }
      __syncthreads();
      if (warp > 0) continue;
      for (int i = 0; i < n; ++i) sum = fmaf(served.weights[first + i], products[i][lane], sum);
    }
    if (among.lora < 0) break;
  }
  if (warp == 0) Store(p, token, slice, column, is_served, sum);
}

template <typename Kernel, typename Params>
Status Start(Kernel kernel, int64_t rows, int64_t parts, int64_t slices, int threads, const Params& p, Stream stream) {
  if (rows > INT32_MAX || parts > 65535 || slices > 65535) return cudaErrorInvalidValue;
  return Launch(kernel, dim3(rows, parts, slices), dim3(threads), p.enable_pdl, stream, p);
}

}  // namespace bgmv

template <typename W>
Status BgmvMoeShrink(const BgmvShrinkParams& p, Stream stream) {
  using namespace bgmv;
  const int64_t pairs = p.by.pairs, slices = p.by.slices;
  if (pairs == 0 || p.rank == 0 || slices == 0) return cudaSuccess;
  if (pairs * p.rank * slices <= FEW_ROWS) {
    return Start(BgmvShrinkKernel<W, 1, 8>, pairs, p.rank, slices, 32, p, stream);
  }
  constexpr int ROWS = 4;
  return Start(BgmvShrinkKernel<W, ROWS, 2>, pairs, CeilDiv(p.rank, THREADS / 32 * ROWS), slices, THREADS, p, stream);
}

template <typename W>
Status BgmvMoeExpand(const BgmvExpandParams& p, Stream stream) {
  using namespace bgmv;
  const int64_t rows = p.finalize ? p.by.tokens : p.by.pairs, width = p.columns + p.zero_columns, slices = p.by.slices;
  if (rows == 0 || width == 0 || slices == 0 || (p.by.pairs == 0 && !p.overwrites)) return cudaSuccess;
  if (p.by.pairs > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t parts = CeilDiv(width, THREADS), blocks = rows * parts * slices;
  if (p.finalize) {
    return blocks <= FEW_BLOCKS
               ? Start(BgmvExpandFewKernel<W>, rows, CeilDiv(width, 32), slices, FEW_WARPS * 32, p, stream)
               : Start(BgmvExpandKernel<W>, rows, parts, slices, THREADS, p, stream);
  }
  constexpr int COLUMNS = 4;
  return blocks <= LATENCY_BLOCKS
             ? Start(BgmvExpandPairsKernel<W, 1>, rows, parts, slices, THREADS, p, stream)
             : Start(BgmvExpandPairsKernel<W, COLUMNS>, rows, CeilDiv(parts, COLUMNS), slices, THREADS, p, stream);
}

}  // namespace flashinfer
