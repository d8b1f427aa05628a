// SPDX-License-Identifier: Apache-2.0
// The general GEMM kernel: a ring of operand tiles in shared memory, accumulators in registers, one tile of results at a time.
// Bound by mma.sync and by the shared memory that feeds it, few rows by reading B.
//
//            K ──►                        all warps of a block copy and multiply; there are no roles
//   A  BLOCK_M x STEP ──┐
//                       ├─► slot 0 │ slot 1 │ .. STAGES    step t multiplies slot t while step t + STAGES - 1 is copied
//   B  BLOCK_N x STEP ──┘        │
//                                ▼ mma.sync, or fp32           SCALED: accumulators of a block of K are scaled, then added
//                      accumulators ───────► matrix in shared memory (where the ring was) ──► scale, bias, round, store
//   test   pytest tests/gemm/test_emulation.py tests/gemm/test_cuda_kernel.py
//   bench  python benchmarks/bench_gemm.py
#pragma once
#include "../../ptx/pdl.cuh"
#include "multiply.cuh"
#include "store.cuh"

namespace flashinfer {
namespace gemm {

/// Compile-time choices of a kernel. SCALED: scales differ between rows or along K, so that accumulators of each block of
/// K are scaled before they are added up; otherwise there is at most one scale per tensor.
template <typename T_, class Tile_, Loads LOADS_, bool SCALED_, int STAGES_>
struct KernelTraits {
  using T = T_;
  using Tile = Tile_;
  static constexpr Loads LOADS = LOADS_;
  static constexpr bool SCALED = SCALED_;
  static constexpr int STAGES = STAGES_, THREADS = Tile::THREADS;
  static constexpr int STEP = ROW_BYTES / int(sizeof(T));  // elements of K per step
  static constexpr int A_BYTES = Tile::BLOCK_M * ROW_BYTES, STAGE_BYTES = A_BYTES + Tile::BLOCK_N * ROW_BYTES;
  static constexpr int RING_BYTES = STAGES * STAGE_BYTES;
  static constexpr int SUMS_BYTES = Tile::PARTS * Tile::BLOCK_M * Tile::SUMS_STRIDE * int(sizeof(float));
  static constexpr int SCALES = Tile::BLOCK_M + Tile::BLOCK_N;  // per block of K, in two buffers behind the ring
  static constexpr int SHARED_BYTES =
      (RING_BYTES > SUMS_BYTES ? RING_BYTES : SUMS_BYTES) + (SCALED ? 2 * SCALES * int(sizeof(float)) : 0);
  /// Blocks that a multiprocessor must have registers for: two large tiles of 16-bit elements hide each other's waits.
  static constexpr int MIN_BLOCKS = THREADS == 256 && !SCALED && sizeof(T) == 2 ? 2 : 1;
  static_assert(!SCALED || SCALES <= THREADS, "each thread loads one scale");
  static_assert(LOADS != Loads::kAny || STAGES == 2, "tiles that go through registers are loaded one step ahead");
};

template <typename T>
__device__ __forceinline__ Operand<T> OperandOf(const Matrix& x, int batch, int row, int rows,
                                                const OperandLayout& layout) {
  const T* data = static_cast<const T*>(x.data) + batch * x.batch_stride + row * x.row_stride;
  return {data, x.row_stride, x.column_stride, rows, layout};
}

/// Scale of one row of a or b that a thread loads for the block.
class ScaleOfThread {
 public:
  template <class Traits>
  static __device__ __forceinline__ ScaleOfThread Of(const GemmPlan& p, const WorkTile& tile) {
    const int i = threadIdx.x, column = i - Traits::Tile::BLOCK_M;
    if (column < 0) return ScaleOfThread(p.x.a_scale, tile.token_batch, tile.row + i, i < tile.rows);
    return ScaleOfThread(p.x.b_scale, tile.weight_batch, tile.column + column,
                         i < Traits::SCALES && tile.column + column < p.n);
  }

  /// Load the scale of a block of K; 0 for rows that do not exist.
  __device__ __forceinline__ float Load(int block) const {
    if (!exists_) return 0.f;
    return data_ == nullptr ? 1.f : data_[block * stride_];
  }

 private:
  __device__ __forceinline__ ScaleOfThread(const Scale& x, int batch, int row, bool exists)
      : data_(x.data), stride_(x.k_stride), exists_(exists) {
    if (data_ != nullptr && exists) data_ += batch * x.batch_stride + row / x.rows * x.row_stride;
  }

  const float* data_;
  int64_t stride_;
  bool exists_;
};

/// Computation of one tile of results.
template <class Traits>
class TileProduct {
 public:
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  using Sums = typename Tile::Sums;

  __device__ __forceinline__ TileProduct(const GemmPlan& p, const WorkTile& tile, unsigned char* shared)
      : p_(p),
        tile_(tile),
        shared_(shared),
        a_(OperandOf<T>(p.x.a, tile.token_batch, tile.row, tile.rows, p.a_layout)),
        b_(OperandOf<T>(p.x.b, tile.weight_batch, tile.column, min(p.n - tile.column, Tile::BLOCK_N), p.b_layout)) {}

  __device__ __forceinline__ void Run() {
    Sums sums{};
    if constexpr (Traits::SCALED) {
      RunScaled(sums);
    } else {
      Begin();
      for (int t = 0; t < p_.k_steps; ++t) Step(sums, t);
    }
    ptx::CopyWait<0>();
    __syncthreads();  // all tiles of the ring have been read, and the ring becomes a matrix of accumulators
    float* matrix = reinterpret_cast<float*>(shared_);
    Tile::Put(sums, matrix);
    __syncthreads();
    StoreTile<Tile>(p_, tile_, matrix, Factor());
    __syncthreads();
  }

 private:
  static constexpr bool THROUGH_REGISTERS = Traits::LOADS == Loads::kAny;

  /// Return the factor of all accumulators.
  __device__ __forceinline__ float Factor() const {
    float factor = p_.x.alpha;
    if constexpr (!Traits::SCALED) {
      if (p_.x.a_scale.data != nullptr) factor *= *p_.x.a_scale.data;
      if (p_.x.b_scale.data != nullptr) factor *= *p_.x.b_scale.data;
    }
    return factor;
  }

  /// Scales of block i are written before the barrier of its first step and read after its last step. The buffers
  /// alternate: whoever writes those of block i has passed a barrier after the reads of block i - 2.
  __device__ __forceinline__ void RunScaled(Sums& sums) {
    float* scales = reinterpret_cast<float*>(shared_ + Traits::SHARED_BYTES) - 2 * Traits::SCALES;
    const ScaleOfThread mine = ScaleOfThread::Of<Traits>(p_, tile_);
    float scale = p_.k > 0 ? mine.Load(0) : 0.f;
    Begin();
    Sums part{};
    KStep at = KStep::First(p_);
    bool is_first = true;
    for (int t = 0, block = 0; t < p_.k_steps; ++t) {
      float* buffer = scales + block % 2 * Traits::SCALES;
      if (is_first) {
        if (threadIdx.x < Traits::SCALES) buffer[threadIdx.x] = scale;
        if (at.block_end < p_.k) scale = mine.Load(block + 1);
      }
      Step(part, t);
      is_first = at.EndsBlock(Traits::STEP);
      if (is_first) {
        Tile::Promote(sums, part, buffer, buffer + Tile::BLOCK_M);
        part = Sums{};
        ++block;
      }
      at.Next(p_, Traits::STEP);
    }
  }

  /// Start the loads of the first steps.
  __device__ __forceinline__ void Begin() {
    next_ = KStep::First(p_);
    if constexpr (THROUGH_REGISTERS) {
      if (p_.k_steps > 0) {
        Fetch();
        Store(0);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Traits::STAGES - 1; ++i) {
        if (i < p_.k_steps) Copy(i);
        ptx::CopyCommit();
      }
    }
  }

  /// Add the products of step `t`, and load a later one into the slot that step t - 1 has left.
  __device__ __forceinline__ void Step(Sums& sums, int t) {
    constexpr int AHEAD = Traits::STAGES - 1;
    ptx::CopyWait<Traits::STAGES - 2>();
    __syncthreads();
    const bool has_next = t + AHEAD < p_.k_steps;
    const int write = read_ == 0 ? AHEAD : read_ - 1;
    if constexpr (THROUGH_REGISTERS) {
      if (has_next) Fetch();
    } else {
      if (has_next) Copy(write);
      ptx::CopyCommit();
    }
    const unsigned char* slot = shared_ + read_ * Traits::STAGE_BYTES;
    const Fp8Formats formats{p_.x.a.element == Element::kE5M2, p_.x.b.element == Element::kE5M2};
    Tile::Multiply(sums, slot, slot + Traits::A_BYTES, formats);
    if constexpr (THROUGH_REGISTERS) {
      if (has_next) Store(write);
    }
    read_ = read_ == AHEAD ? 0 : read_ + 1;
  }

  __device__ __forceinline__ void Copy(int slot) {
    const uint32_t to = ptx::SharedAddress(shared_ + slot * Traits::STAGE_BYTES);
    CopyRows<Tile::BLOCK_M, Traits::THREADS>(to, a_, next_.begin, next_.block_end);
    if constexpr (Traits::LOADS == Loads::kColumns) {
      CopyColumns<Tile::BLOCK_N, Traits::THREADS>(to + Traits::A_BYTES, b_, next_.begin, next_.block_end);
    } else {
      CopyRows<Tile::BLOCK_N, Traits::THREADS>(to + Traits::A_BYTES, b_, next_.begin, next_.block_end);
    }
    next_.Next(p_, Traits::STEP);
  }

  __device__ __forceinline__ void Fetch() {
    a_part_.Fetch(a_, next_.begin, next_.block_end);
    b_part_.Fetch(b_, next_.begin, next_.block_end);
    next_.Next(p_, Traits::STEP);
  }
  __device__ __forceinline__ void Store(int slot) const {
    const uint32_t to = ptx::SharedAddress(shared_ + slot * Traits::STAGE_BYTES);
    a_part_.Store(to, a_.layout.by_rows);
    b_part_.Store(to + Traits::A_BYTES, b_.layout.by_rows);
  }

  const GemmPlan& p_;
  const WorkTile& tile_;
  unsigned char* shared_;
  Operand<T> a_, b_;
  KStep next_{};  // the next step to load
  int read_ = 0;  // slot of the step to multiply
  Fetched<Tile::BLOCK_M, Traits::THREADS, T> a_part_;
  Fetched<Tile::BLOCK_N, Traits::THREADS, T> b_part_;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::THREADS, Traits::MIN_BLOCKS) GemmKernel(const __grid_constant__ GemmPlan p) {
  extern __shared__ __align__(128) unsigned char shared[];
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  WorkTile tile;
  for (int64_t t = blockIdx.x; GetTile<Traits::Tile::BLOCK_M, Traits::Tile::BLOCK_N>(p, t, tile); t += gridDim.x) {
    if (tile.exists) TileProduct<Traits>(p, tile, shared).Run();
  }
}

}  // namespace gemm
}  // namespace flashinfer
