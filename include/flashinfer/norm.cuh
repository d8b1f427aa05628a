// SPDX-License-Identifier: Apache-2.0
// RMSNorm on CUDA (formulas and parameters: norm.h). Bound by DRAM: each row is read once and written once.
//
// Four kernels, by the length of a row and the size of the batch:
//   lanes   up to 2 KB    1 to 32 lanes of a warp hold a row in registers; no shared memory, no barrier
//   small   1 to 16 KB    a block holds a row, one barrier, batches of up to 4 MB (norm_small.cuh)
//   block   up to 64 KB   the same for large batches: two 16-byte vectors per thread up to 16 KB, four beyond and where
//                         reads outweigh writes (fp8 output)
//   long    beyond, and rows that are not 16-byte aligned: a block per row, which it reads again from L2
//
// Large batches prefetch a later row into L2 with one bulk instruction, which has to be issued before the block's own
// loads. Instructions before the first load count, so heads are in the grid and loads are clamped instead of guarded.
// Measurements: docs/performance/norm.md.
//   test  pytest tests/norm      bench  python benchmarks/bench_norm.py
#pragma once
#include "norm_row.cuh"
#include "norm_small.cuh"
#include "ptx/pdl.cuh"
#include "utils.cuh"

namespace flashinfer {
namespace norm {

/// Kernel "lanes": blockDim.x lanes of a warp hold ROWS rows, NVEC vectors each. The rows of a block interleave: one
/// instruction of a warp covers neighbouring rows. Indices outside of the row are clamped, and not added to the sum.
template <typename T, typename F, int VEC, int NVEC, int ROWS>
__global__ void __launch_bounds__(128) RMSNormLanesKernel(const __grid_constant__ RowArgs<T, uint32_t> a) {
  using V = Vec<T, VEC>;
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const uint32_t first = BlockOfHead() * blockDim.y * ROWS + threadIdx.y;
  int column[NVEC];
  bool inside[NVEC];
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    const int wanted = int(threadIdx.x + v * blockDim.x) * VEC;
    inside[v] = wanted < a.hidden;
    column[v] = min(wanted, a.hidden - VEC);
  }

  V x[ROWS][NVEC], add[F::RESIDUAL ? ROWS : 1][F::RESIDUAL ? NVEC : 1], w[NVEC];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const Row<T, F, VEC, uint32_t> row(a, min(first + r * blockDim.y, a.batch - 1), blockIdx.x);
#pragma unroll
    for (int v = 0; v < NVEC; ++v) {
      x[r][v] = V::Load(row.input + column[v]);
      if constexpr (F::RESIDUAL) add[r][v] = V::Load(row.residual + column[v]);
    }
  }
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    const uint32_t rows = blockDim.y * ROWS, begin = BlockOfHead() * rows;
    Row<T, F, VEC, uint32_t>(a, begin, blockIdx.x).PrefetchAhead(begin, rows);
  }
#pragma unroll
  for (int v = 0; v < NVEC; ++v) w[v] = V::Load(a.weight + column[v]);
  const float inv_scale = InverseScale<F>(a.scale);

  float sum[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    sum[r] = 0.f;
#pragma unroll
    for (int v = 0; v < NVEC; ++v) {
      const float part = SumOfSquares<F>(x[r][v], add[F::RESIDUAL ? r : 0][F::RESIDUAL ? v : 0]);
      sum[r] += inside[v] ? part : 0.f;
    }
  }
  for (int offset = blockDim.x / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], offset);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const uint32_t index = first + r * blockDim.y;
    if (index >= a.batch) return;
    const Row<T, F, VEC, uint32_t> row(a, index, blockIdx.x);
    const float rstd = rsqrtf(sum[r] * a.inv_hidden + a.eps);
#pragma unroll
    for (int v = 0; v < NVEC; ++v) {
      float s[VEC];
      Values<F>(x[r][v], add[F::RESIDUAL ? r : 0][F::RESIDUAL ? v : 0], s);
      if (!inside[v]) continue;
      row.StoreResidual(column[v], s);
      row.Store(column[v], s, rstd, w[v], inv_scale);
    }
  }
}

/// True if reads outweigh writes: more loads are then in flight, in the block and by prefetch.
template <typename F>
constexpr bool READS_MORE = F::QUANT && !F::RESIDUAL;

/// Prefetch distance in bytes, from the row that is read to the row that is prefetched.
template <typename F>
constexpr int64_t AHEAD = (READS_MORE<F> ? 8 : 5) << 19;

/// Largest number of threads of a block that holds a row.
constexpr int BlockLimit(int nvec) { return nvec == 2 ? 512 : 1024; }

/// Occupancy in blocks of 512 threads that the register count must allow: SM75 has 1024 threads per SM, later chips
/// 1536 up.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int MAX_BLOCKS = 2;
#else
constexpr int MAX_BLOCKS = 3;
#endif

template <typename F>
constexpr int MinBlocks(int nvec) {
  return nvec == 4 ? 1 : F::RESIDUAL || F::QUANT ? 2 : MAX_BLOCKS;
}

/// Kernel "block": a block holds one row, NVEC vectors per thread; the grid is (rows, heads). Weights are loaded
/// together with the row if there are enough registers.
template <typename T, typename F, int VEC, int NVEC>
__global__ void __launch_bounds__(BlockLimit(NVEC), MinBlocks<F>(NVEC))
    RMSNormBlockKernel(const __grid_constant__ RowArgs<T, uint32_t> a) {
  using V = Vec<T, VEC>;
  constexpr bool EARLY = NVEC == 2 || !(F::RESIDUAL || F::SILU);
  __shared__ float scratch[32];
  ptx::GridDependencyWait();
  const Row<T, F, VEC, uint32_t> row(a, blockIdx.x, blockIdx.y);
  int column[NVEC];
  bool inside[NVEC];
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    const int wanted = int(threadIdx.x + v * blockDim.x) * VEC;
    inside[v] = wanted < a.hidden;
    column[v] = min(wanted, a.hidden - VEC);
  }

  V x[NVEC], add[F::RESIDUAL ? NVEC : 1], w[EARLY ? NVEC : 1];
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    x[v] = V::Load(row.input + column[v]);
    if constexpr (F::RESIDUAL) add[v] = V::Load(row.residual + column[v]);
  }
  if (threadIdx.x == 0) row.PrefetchAhead(blockIdx.x, 1);  // here: further down, it would wait for the loads
  if constexpr (EARLY) {
#pragma unroll
    for (int v = 0; v < NVEC; ++v) w[v] = V::Load(a.weight + column[v]);
  }
  ptx::LaunchDependents();  // also a compiler fence: without it, weights are loaded after the sum
  const float inv_scale = InverseScale<F>(a.scale);

  float s[NVEC][VEC], sum = 0.f;
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    Values<F>(x[v], add[F::RESIDUAL ? v : 0], s[v]);
    const float part = SumOfSquares(s[v]);
    sum += inside[v] ? part : 0.f;
    if (inside[v]) row.StoreResidual(column[v], s[v]);
  }
  const float rstd = rsqrtf(BlockSum(sum, scratch) * a.inv_hidden + a.eps);
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    if (!inside[v]) continue;
    row.Store(column[v], s[v], rstd, EARLY ? w[EARLY ? v : 0] : V::Load(a.weight + column[v]), inv_scale);
  }
}

/// Kernel "long": a block reads its row twice; any length, any alignment (VEC 1).
template <typename T, typename F, int VEC>
__global__ void __launch_bounds__(1024)
    RMSNormLongKernel(const __grid_constant__ RowArgs<T, int64_t> a, int64_t hidden) {
  using V = Vec<T, VEC>;
  __shared__ float scratch[32];
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  if (BlockOfHead() >= a.batch) return;
  const Row<T, F, VEC, int64_t> row(a, BlockOfHead(), blockIdx.x);
  const int64_t begin = threadIdx.x * VEC, step = blockDim.x * VEC;
  const float inv_scale = InverseScale<F>(a.scale);
  auto residual_at = [&](int64_t column) { return F::RESIDUAL ? V::Load(row.residual + column) : V::Zero(); };

  float sum = 0.f;
  for (int64_t column = begin; column < hidden; column += step) {
    sum += SumOfSquares<F>(V::Load(row.input + column), residual_at(column));
  }
  const float rstd = rsqrtf(BlockSum(sum, scratch) * a.inv_hidden + a.eps);
  for (int64_t column = begin; column < hidden; column += step) {
    float s[VEC];
    Values<F>(V::Load(row.input + column), residual_at(column), s);
    row.StoreResidual(column, s);
    row.Store(column, s, rstd, V::Load(a.weight + column), inv_scale);
  }
}

constexpr int64_t MAX_GRID_Y = 65535;

/// Return the grid of `blocks` blocks for each head.
inline dim3 HeadGrid(int64_t heads, int64_t blocks) {
  const int64_t z = CeilDiv(blocks, MAX_GRID_Y);
  return dim3(heads, CeilDiv(blocks, z), z);
}

template <typename T>
bool CanVectorise(const RMSNormParams<T>& p, int vec) {
  auto fits = [&](int64_t stride) { return stride % vec == 0 && stride <= UINT32_MAX; };
  auto both_fit = [&](RowStride s) { return fits(s.batch) && fits(s.head); };
  const size_t out_bytes = p.out_kind == NormOut::kSame ? 16 : vec;
  return p.hidden % vec == 0 && IsAligned(p.input, 16) && IsAligned(p.weight, 16) && IsAligned(p.out, out_bytes) &&
         both_fit(p.input_stride) && both_fit(p.out_stride) &&
         (p.residual == nullptr || (IsAligned(p.residual, 16) && both_fit(p.residual_stride)));
}

/// Simplify rows and heads. Heads whose stride continues that of the rows become rows. If there are more heads than the
/// second dimension of a grid allows, heads and rows are exchanged: there are fewer rows then.
template <typename T>
void FoldHeads(RMSNormParams<T>& p) {
  const auto strides = {&p.input_stride, &p.out_stride, &p.residual_stride};
  auto folds = [&](RowStride s) { return s.batch == p.heads * s.head; };
  if (p.heads > 1 && folds(p.input_stride) && folds(p.out_stride) &&
      (p.residual == nullptr || folds(p.residual_stride))) {
    for (RowStride* stride : strides) stride->batch = stride->head;
    p.heads = 1;
  }
  if (p.heads > MAX_GRID_Y) {
    for (RowStride* stride : strides) std::swap(stride->batch, stride->head);
    p.heads = p.num_rows / p.heads;
  }
}

/// True if the batch is so large that later rows are prefetched; all rows of a smaller one are loaded at once.
template <typename T>
bool IsLarge(const RMSNormParams<T>& p) {
  return p.num_rows * p.hidden * int64_t(sizeof(T)) >= 4 << 20;
}

/// True if the rows of the inputs are contiguous.
template <typename T>
bool IsDense(const RMSNormParams<T>& p) {
  return p.input_stride.batch == p.hidden && (p.residual == nullptr || p.residual_stride.batch == p.hidden);
}

/// Make the kernel arguments. `bytes_ahead`: prefetch distance in bytes; 0 for no prefetch.
template <typename Int, typename T>
RowArgs<T, Int> ArgsOf(const RMSNormParams<T>& p, int64_t bytes_ahead) {
  auto narrow = [](RowStride s) { return Stride<Int>{Int(s.batch), Int(s.head)}; };
  RowArgs<T, Int> a;
  a.input = p.input;
  a.weight = p.weight;
  a.input_stride = narrow(p.input_stride);
  a.hidden = int(std::min<int64_t>(p.hidden, INT32_MAX));
  a.batch = uint32_t(p.num_rows / p.heads);
  a.ahead = bytes_ahead != 0 ? uint32_t(CeilDiv(bytes_ahead, p.hidden * sizeof(T))) : a.batch;
  a.inv_hidden = 1.f / float(p.hidden);
  a.eps = p.eps;
  a.weight_bias = p.weight_bias;
  a.out = p.out;
  a.residual = p.residual;
  a.out_stride = narrow(p.out_stride);
  a.residual_stride = narrow(p.residual_stride);
  a.scale = p.scale;
  a.out_kind = p.out_kind;
  return a;
}

}  // namespace norm

template <typename T, typename F>
Status RMSNormOf(const RMSNormParams<T>& params, Stream stream) {
  using namespace norm;
  constexpr int VEC = 16 / sizeof(T);
  RMSNormParams<T> p = params;
  if (p.num_rows == 0 || p.hidden == 0) return cudaSuccess;
  if (p.num_rows > INT32_MAX) return cudaErrorInvalidValue;
  FoldHeads(p);
  const int64_t batch = p.num_rows / p.heads;
  const bool is_large = IsLarge(p);
  const int64_t ahead = is_large ? AHEAD<F> : 0;

  auto lanes_kernel = [&](auto kernel, int lanes, int rows) {
    constexpr int THREADS = 128;  // larger blocks wait for their slowest warp, smaller ones run out of block slots
    const dim3 block(lanes, THREADS / lanes);
    const dim3 grid = HeadGrid(p.heads, CeilDiv(batch, int64_t(block.y) * rows));
    return Launch(kernel, grid, block, p.enable_pdl, stream, ArgsOf<uint32_t>(p, IsDense(p) ? ahead : 0));
  };
  auto block_kernel = [&](auto kernel, int nvec) {
    const dim3 grid(batch, p.heads), block(BlockThreads(p.hidden, VEC * nvec));
    return Launch(kernel, grid, block, p.enable_pdl, stream, ArgsOf<uint32_t>(p, ahead));
  };
  auto long_kernel = [&](auto kernel, int threads) {
    const dim3 grid = HeadGrid(p.heads, batch);
    return Launch(kernel, grid, dim3(threads), p.enable_pdl, stream, ArgsOf<int64_t>(p, 0), p.hidden);
  };

  if (!CanVectorise(p, VEC)) return long_kernel(RMSNormLongKernel<T, F, 1>, BlockThreads(p.hidden, 4));
  const int64_t vectors = p.hidden / VEC;
  if (vectors <= 32) return lanes_kernel(RMSNormLanesKernel<T, F, VEC, 1, 2>, NextPowerOfTwo(int(vectors)), 2);
  if (vectors <= 64) return lanes_kernel(RMSNormLanesKernel<T, F, VEC, 2, 1>, 32, 1);
  if (!is_large && p.heads == 1 && vectors <= SMALL_VECTORS) return LaunchSmall<F>(p, stream);
  if (vectors <= 128) return lanes_kernel(RMSNormLanesKernel<T, F, VEC, 4, 1>, 32, 1);
  if constexpr (!READS_MORE<F>) {
    if (vectors <= BlockLimit(2) * 2) return block_kernel(RMSNormBlockKernel<T, F, VEC, 2>, 2);
  }
  if (vectors <= BlockLimit(4) * 4) return block_kernel(RMSNormBlockKernel<T, F, VEC, 4>, 4);
  return long_kernel(RMSNormLongKernel<T, F, VEC>, 1024);
}

}  // namespace flashinfer
