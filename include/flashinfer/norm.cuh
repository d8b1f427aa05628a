// SPDX-License-Identifier: Apache-2.0
// RMSNorm on CUDA (formulas and parameters: norm.h). Bound by DRAM: each row is read once and written once.
//
// Three kernels, by the length of a row:
//   lanes   up to 2 KB    1 to 32 lanes of a warp hold a row in registers; no shared memory, no barrier
//   block   up to 64 KB   a block holds a row, one barrier: two 16-byte vectors per thread up to 16 KB, four beyond
//                         and, for large batches, where reads outweigh writes (residual, fp8 output)
//   long    beyond, and rows that are not 16-byte aligned: a block per row, which it reads again from L2
//
// What matters, measured on an H200 (bf16, L2 flushed; a device-to-device copy of 16384 x 4096 takes 67.5 us):
// * Bytes in flight have an optimum, about 48 KB per SM, and small blocks beat large ones. 16384 x 4096: two vectors
//   per thread 68.8 us; four 70.7; one 78; a warp per row 77; persistent blocks with the next row prefetched into
//   registers 79, or into shared memory by bulk copies 75, at any depth. 524288 x 128: two rows per lane group 67 us;
//   four 71; one 82.
// * Plain loads: `L1::no_allocate` cost 4 us, L2 eviction hints gained nothing, prefetching weights to L1 cost 18.
// * Instructions before the first load count: a division by the number of heads in the row offset cost 6 us on short
//   rows and 0.25 us of 5.4 on small batches. Hence heads in the grid, 32-bit columns, clamped not guarded loads.
// * Weights loaded with the row save their latency: 1 x 4096 takes 4.5 us, not 4.7; 8192 x 8192 69.6, not 72.5. The
//   compiler moves such loads behind the sum unless something stands between. They must not cost occupancy: without
//   the bound on registers 8192 x 8192 takes 82 us.
// * Two vectors of a warp in one piece of 1 KB, not a block's width apart: no faster, and 0.1 us slower at 128 x 8192.
// * After a memset of 512 MB, which leaves L2 full of dirty lines, no copy of 16384 x 4096 was faster than 67.7 us: 256
//   or 128 threads with one vector each. Bulk loads and stores, rings of them, L2 policies: 68.2 to 73.
//   test  pytest tests/norm      bench  python benchmarks/bench_norm.py
#pragma once
#include "norm.h"
#include "ptx/pdl.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace norm {

/// RMSNormParams in the form the kernels want: 32-bit sizes, heads in the grid.
template <typename T>
struct RowArgs {
  const T* input;
  T* residual;
  const T* weight;
  void* out;
  const float* scale;
  RowStride input_stride, residual_stride, out_stride;
  uint32_t batch;  // rows of one head
  int hidden;
  float inv_hidden, eps, weight_bias;
  NormOut out_kind;
};

/// Index of this block among those of its head: the grid is (heads, y, z), and may have a few blocks too many.
__device__ __forceinline__ uint32_t BlockOfHead() { return blockIdx.z * gridDim.y + blockIdx.y; }

/// One row: where it is, and how a vector of it is finished.
template <typename T, typename F, int VEC>
struct Row {
  using V = Vec<T, VEC>;
  const RowArgs<T>& a;
  const T* input;
  T* residual;
  int64_t out;

  __device__ __forceinline__ Row(const RowArgs<T>& args, uint32_t row)
      : a(args),
        input(a.input + Offset(row, a.input_stride)),
        residual(F::RESIDUAL ? a.residual + Offset(row, a.residual_stride) : nullptr),
        out(Offset(row, a.out_stride)) {}

  __device__ __forceinline__ static int64_t Offset(uint32_t row, RowStride stride) {
    return row * stride.batch + blockIdx.x * stride.head;
  }

  /// Write one vector of the result; `s` holds the values before normalisation.
  __device__ __forceinline__ void Finish(int64_t column, float (&s)[VEC], float rstd, const V& weight,
                                         float inv_scale) const {
    if constexpr (F::RESIDUAL) RoundTo<T, VEC>(s).Store(residual + column);
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      s[i] = s[i] * rstd * (a.weight_bias + weight.Float(i));
      if constexpr (F::SILU) s[i] = s[i] / (1.f + __expf(-s[i]));
      if constexpr (F::QUANT) s[i] *= inv_scale;
    }
    if constexpr (F::QUANT) {
      const auto kind = a.out_kind == NormOut::kE4M3 ? __NV_E4M3 : __NV_E5M2;
      RoundToFp8<VEC>(s, kind).Store(static_cast<uint8_t*>(a.out) + out + column);
    } else {
      RoundTo<T, VEC>(s).Store(static_cast<T*>(a.out) + out + column);
    }
  }
};

/// Values of a vector as fp32, the residual added.
template <typename F, typename T, int VEC>
__device__ __forceinline__ void Values(const Vec<T, VEC>& x, const Vec<T, VEC>& add, float (&s)[VEC]) {
#pragma unroll
  for (int i = 0; i < VEC; ++i) s[i] = F::RESIDUAL ? x.Float(i) + add.Float(i) : x.Float(i);
}

template <typename F, typename T, int VEC>
__device__ __forceinline__ float SumOfSquares(const Vec<T, VEC>& x, const Vec<T, VEC>& add) {
  float s[VEC], sum = 0.f;
  Values<F>(x, add, s);
#pragma unroll
  for (int i = 0; i < VEC; ++i) sum += s[i] * s[i];
  return sum;
}

template <typename F>
__device__ __forceinline__ float InverseScale(const float* scale) {
  return F::QUANT && scale != nullptr ? 1.f / *scale : 1.f;
}

/// blockDim.x lanes of a warp hold ROWS rows, NVEC vectors each. The rows of a block interleave: one instruction of a
/// warp covers neighbouring rows. What lies outside is read from the nearest place inside and left out of the sum.
template <typename T, typename F, int VEC, int NVEC, int ROWS>
__global__ void __launch_bounds__(128) RMSNormLanesKernel(const __grid_constant__ RowArgs<T> a) {
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
    const Row<T, F, VEC> row(a, min(first + r * blockDim.y, a.batch - 1));
#pragma unroll
    for (int v = 0; v < NVEC; ++v) {
      x[r][v] = V::Load(row.input + column[v]);
      if constexpr (F::RESIDUAL) add[r][v] = V::Load(row.residual + column[v]);
    }
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
    const Row<T, F, VEC> row(a, index);
    const float rstd = rsqrtf(sum[r] * a.inv_hidden + a.eps);
#pragma unroll
    for (int v = 0; v < NVEC; ++v) {
      float s[VEC];
      Values<F>(x[r][v], add[F::RESIDUAL ? r : 0][F::RESIDUAL ? v : 0], s);
      if (inside[v]) row.Finish(column[v], s, rstd, w[v], inv_scale);
    }
  }
}

/// Most threads of a block that holds a row.
constexpr int BlockLimit(int nvec) { return nvec == 2 ? 512 : 1024; }

/// Two vectors per thread even for many rows: where no more is read than written, in one stream.
template <typename F>
constexpr bool ALWAYS_TWO = !F::RESIDUAL && !F::QUANT;

/// Blocks of 512 threads that registers must then leave room for: SM75 has 1024 threads per SM, later chips 1536 up.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int MIN_BLOCKS = 2;
#else
constexpr int MIN_BLOCKS = 3;
#endif

/// A block holds one row, NVEC vectors per thread. Two leave registers for weights, which are loaded with the row.
template <typename T, typename F, int VEC, int NVEC>
__global__ void __launch_bounds__(BlockLimit(NVEC), NVEC == 2 && ALWAYS_TWO<F> ? MIN_BLOCKS : 1)
    RMSNormBlockKernel(const __grid_constant__ RowArgs<T> a) {
  using V = Vec<T, VEC>;
  constexpr bool EARLY = NVEC == 2;
  __shared__ float scratch[32];
  ptx::GridDependencyWait();
  if constexpr (!EARLY) ptx::LaunchDependents();
  if (BlockOfHead() >= a.batch) return;
  const Row<T, F, VEC> row(a, BlockOfHead());
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
  if constexpr (EARLY) {
#pragma unroll
    for (int v = 0; v < NVEC; ++v) w[v] = V::Load(a.weight + column[v]);
    ptx::LaunchDependents();  // and a fence: without it weights are loaded behind the sum
  }
  const float inv_scale = InverseScale<F>(a.scale);

  float sum = 0.f;
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    const float part = SumOfSquares<F>(x[v], add[F::RESIDUAL ? v : 0]);
    sum += inside[v] ? part : 0.f;
  }
  const float rstd = rsqrtf(BlockSum(sum, scratch) * a.inv_hidden + a.eps);
#pragma unroll
  for (int v = 0; v < NVEC; ++v) {
    float s[VEC];
    Values<F>(x[v], add[F::RESIDUAL ? v : 0], s);
    if (inside[v]) row.Finish(column[v], s, rstd, EARLY ? w[EARLY ? v : 0] : V::Load(a.weight + column[v]), inv_scale);
  }
}

/// A block reads its row twice; any length, any alignment (VEC 1).
template <typename T, typename F, int VEC>
__global__ void __launch_bounds__(1024) RMSNormLongKernel(const __grid_constant__ RowArgs<T> a, int64_t hidden) {
  using V = Vec<T, VEC>;
  __shared__ float scratch[32];
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  if (BlockOfHead() >= a.batch) return;
  const Row<T, F, VEC> row(a, BlockOfHead());
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
    row.Finish(column, s, rstd, V::Load(a.weight + column), inv_scale);
  }
}

/// The grid of `blocks` blocks for each head.
inline dim3 HeadGrid(int64_t heads, int64_t blocks) {
  constexpr int64_t MAX_Y = 65535;
  const int64_t z = CeilDiv(blocks, MAX_Y);
  return dim3(heads, CeilDiv(blocks, z), z);
}

template <typename T>
bool CanVectorise(const RMSNormParams<T>& p, int vec) {
  auto strides_divide = [&](RowStride s) { return s.batch % vec == 0 && s.head % vec == 0; };
  const size_t out_bytes = p.out_kind == NormOut::kSame ? 16 : vec;
  return p.hidden % vec == 0 && IsAligned(p.input, 16) && IsAligned(p.weight, 16) && IsAligned(p.out, out_bytes) &&
         strides_divide(p.input_stride) && strides_divide(p.out_stride) &&
         (p.residual == nullptr || (IsAligned(p.residual, 16) && strides_divide(p.residual_stride)));
}

/// Heads that follow each other at the distance of rows are rows.
template <typename T>
void FoldHeads(RMSNormParams<T>& p) {
  auto folds = [&](RowStride s) { return s.batch == p.heads * s.head; };
  if (p.heads > 1 && folds(p.input_stride) && folds(p.out_stride) &&
      (p.residual == nullptr || folds(p.residual_stride))) {
    for (RowStride* stride : {&p.input_stride, &p.out_stride, &p.residual_stride}) stride->batch = stride->head;
    p.heads = 1;
  }
}

}  // namespace norm

template <typename T, typename F>
Status RMSNormOf(const RMSNormParams<T>& params, Stream stream) {
  using namespace norm;
  constexpr int VEC = 16 / sizeof(T);
  RMSNormParams<T> p = params;
  if (p.num_rows == 0 || p.hidden == 0) return cudaSuccess;
  FoldHeads(p);
  if (p.num_rows > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t batch = p.num_rows / p.heads;
  const RowArgs<T> a{p.input,
                     p.residual,
                     p.weight,
                     p.out,
                     p.scale,
                     p.input_stride,
                     p.residual_stride,
                     p.out_stride,
                     uint32_t(batch),
                     int(std::min<int64_t>(p.hidden, INT32_MAX)),
                     1.f / float(p.hidden),
                     p.eps,
                     p.weight_bias,
                     p.out_kind};

  auto lanes_kernel = [&](auto kernel, int lanes, int rows) {
    constexpr int THREADS = 128;  // larger blocks wait for their slowest warp, smaller ones run out of block slots
    const dim3 block(lanes, THREADS / lanes);
    return Launch(kernel, HeadGrid(p.heads, CeilDiv(batch, int64_t(block.y) * rows)), block, p.enable_pdl, stream, a);
  };
  auto block_kernel = [&](auto kernel, int threads, auto... more) {
    return Launch(kernel, HeadGrid(p.heads, batch), dim3(threads), p.enable_pdl, stream, a, more...);
  };

  if (!CanVectorise(p, VEC)) return block_kernel(RMSNormLongKernel<T, F, 1>, BlockThreads(p.hidden, 4), p.hidden);
  const int64_t vectors = p.hidden / VEC;
  if (vectors <= 32) return lanes_kernel(RMSNormLanesKernel<T, F, VEC, 1, 2>, NextPowerOfTwo(int(vectors)), 2);
  if (vectors <= 64) return lanes_kernel(RMSNormLanesKernel<T, F, VEC, 2, 1>, 32, 1);
  if (vectors <= 128) return lanes_kernel(RMSNormLanesKernel<T, F, VEC, 4, 1>, 32, 1);
  if (vectors > BlockLimit(4) * 4) return block_kernel(RMSNormLongKernel<T, F, VEC>, 1024, p.hidden);
  constexpr int64_t ONE_WAVE = 132 * 1024;  // threads
  const int two = BlockThreads(p.hidden, VEC * 2);
  const bool wants_two = ALWAYS_TWO<F> || p.num_rows * two <= ONE_WAVE;
  if (wants_two && vectors <= BlockLimit(2) * 2) return block_kernel(RMSNormBlockKernel<T, F, VEC, 2>, two);
  return block_kernel(RMSNormBlockKernel<T, F, VEC, 4>, BlockThreads(p.hidden, VEC * 4));
}

}  // namespace flashinfer
