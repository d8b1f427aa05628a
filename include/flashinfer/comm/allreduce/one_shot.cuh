// SPDX-License-Identifier: Apache-2.0
// All-reduce by pushing, with sentinels instead of barriers; formulas in params.h. One-shot:
//
//   rank 0   input --push--> slot 0 of every rank        slots 0..P-1 of the own memory --sum--> residual, norm, outputs
//   rank 1   input --push--> slot 1 of every rank        a word that still is the sentinel has not arrived: poll again
//
// Two-shot, for messages whose P - 1 copies take longer than a second step: rank r owns c = ceil(tokens / P) rows. Every
// rank pushes them to the owner, into rows [0, c) of its slot there; the owner sums and pushes the sums to all, into rows
// [c, 2c) of its slot. All CTAs push before any waits, so ranks need no order.
// A CTA takes whole rows, and pushes and sums the same ones: so results may overwrite the input. A word of a payload
// never equals the sentinel, fp32 -0.0, because -0.0 leaves as +0.0.
// Three generations of slots: call f uses f mod 3 and puts sentinels back into what call f - 1 used, as many as that call
// recorded (its size may be another one than this call's). A peer writes there again in call f + 2, which it enters after
// it has received this rank's call f + 1, which follows on this call. Counters are in device memory: calls are captured
// in graphs. A flag counts data, not blocks: ranks with different grids get along.
// Waiting ends after `timeout_ns`: the watchdog writes (rank, call, row) to the host and an abort word to every peer.
// Bound by the link: (P - 1) * bytes leave each rank, and as many arrive.
//   test  pytest tests/comm/test_allreduce.py tests/comm/test_emulated_allreduce.py tests/comm/test_allreduce_gpu.py
//   bench  python benchmarks/bench_comm.py
#pragma once
#include "../../e2m1.cuh"
#include "../../ptx/atomic.cuh"
#include "../../ptx/globaltimer.cuh"
#include "../../ptx/pdl.cuh"
#include "../../ptx/system.cuh"
#include "../../utils.cuh"
#include "../../vec_dtypes.cuh"
#include "params.h"

namespace flashinfer {
namespace comm {

constexpr uint32_t SENTINEL = 0x80000000u;  // in the upper half of a pair of 16-bit numbers: -0.0 as well
constexpr int GENERATIONS = 3;

/// Head of the memory of a rank on CUDA. Zero bytes are its first state.
struct DeviceHead {
  uint32_t call;               ///< calls that are done
  uint32_t generation;         ///< slots of the next call; apart from `call`, which wraps at no multiple of 3
  int32_t arrived;             ///< blocks of the running call that are done
  uint32_t aborted;            ///< written by a peer that gave up: 1 + the rank it waited for
  uint32_t used[GENERATIONS];  ///< 16-byte words of each slot that the last call of the generation used
};
static_assert(sizeof(DeviceHead) <= HEAD_BYTES, "the head must fit in front of the slots");

/// Words of the record that the watchdog leaves on the host.
enum Record : int { kRecordFound = 0, kRecordRank = 1, kRecordCall = 2, kRecordRow = 3 };

/// IS_FP4: kernels of their own, so that the others stay as they were measured.
template <typename T, bool IS_TWO_SHOT = false, bool IS_FP4 = false>
struct OneShot {
  static constexpr int VEC = 16 / sizeof(T);
  using V = Vec<T, VEC>;

  const AllReduceParams<T>& p;
  DeviceHead* const head;
  const uint32_t generation, words;  // words: 16-byte words of a row
  bool has_given_up = false;

  __device__ __forceinline__ explicit OneShot(const AllReduceParams<T>& params)
      : p(params),
        head(reinterpret_cast<DeviceHead*>(params.peers.memory[params.peers.rank])),
        generation(*const_cast<const volatile uint32_t*>(&head->generation)),
        words(uint32_t(params.hidden / VEC)) {}

  /// Slot of the data of rank `source` in the memory of rank `owner`.
  __device__ __forceinline__ uint4* Slot(int owner, int source, uint32_t gen) const {
    char* const slots = p.peers.memory[owner] + HEAD_BYTES;
    return reinterpret_cast<uint4*>(slots + (int64_t(gen) * p.peers.world + source) * p.slot_bytes);
  }

  __device__ __forceinline__ int64_t RowsOfOwner() const { return (p.tokens + p.peers.world - 1) / p.peers.world; }

  /// 16 bytes of a row of this rank.
  __device__ __forceinline__ V Input(int64_t row, uint32_t i) const {
    return p.source.count == 0 ? V::Load(p.input + row * p.hidden + i * VEC) : WeightedInput(row, i);
  }

  /// The same where the row is a sum. A call of its own: its registers would be those of all kernels.
  __device__ __noinline__ V WeightedInput(int64_t row, uint32_t i) const {
    const RowSource<T>& s = p.source;
    float sum[VEC] = {};
    for (int k = 0; k < s.count; ++k) {
      const int64_t at = s.index != nullptr ? row * s.count + k : k * p.tokens + row;
      const int64_t from = s.index != nullptr ? s.index[at] : at;
      if (from < 0) continue;
      const V x = V::Load(p.input + from * p.hidden + i * VEC);
      const float weight = s.weights != nullptr         ? s.weights[at]
                           : s.typed_weights != nullptr ? ToFloat(s.typed_weights[at])
                                                        : 1.f;
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum[j] += weight * x.Float(j);
    }
    const V add = s.add != nullptr ? V::Load(s.add + row * p.hidden + i * VEC) : V::Zero();
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum[j] = sum[j] * s.factor + add.Float(j);
    return RoundTo<T, VEC>(sum);
  }

  static __device__ __forceinline__ void NoSentinel(V& x) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) x[j] = ToFloat(x[j]) == 0.f ? FromFloat<T>(0.f) : x[j];
  }

  /// Push one row to its owner.
  __device__ __forceinline__ void PushToOwner(int64_t row) const {
    const int64_t owner = row / RowsOfOwner();
    uint4* const to = Slot(int(owner), p.peers.rank, generation) + (row - owner * RowsOfOwner()) * words;
    for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
      V x = Input(row, i);
      NoSentinel(x);
      ptx::StoreSystem(to + i, *reinterpret_cast<const uint4*>(&x));
    }
  }

  /// Sum a row that this rank owns, number `row` of those, and push it to all.
  __device__ __forceinline__ void PushSum(int64_t row) {
    for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
      V sum = Sum(row, i);
      NoSentinel(sum);
      for (int k = 0; k < p.peers.world; ++k) {
        int peer = p.peers.rank + k;
        peer -= peer >= p.peers.world ? p.peers.world : 0;
        ptx::StoreSystem(Slot(peer, p.peers.rank, generation) + (RowsOfOwner() + row) * words + i,
                         *reinterpret_cast<const uint4*>(&sum));
      }
    }
  }

  /// 16 bytes of the sum of all ranks.
  __device__ __forceinline__ V Total(int64_t row, uint32_t i) {
    if constexpr (!IS_TWO_SHOT) {
      return Sum(row, i);
    } else {
      const int64_t owner = row / RowsOfOwner();
      const uint4 raw = Receive(int(owner), RowsOfOwner() + row - owner * RowsOfOwner(), i);
      return reinterpret_cast<const V&>(raw);
    }
  }

  __device__ __forceinline__ void Push(int64_t row) const {
    for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
      V x = Input(row, i);
      NoSentinel(x);
      for (int k = 0; k < p.peers.world; ++k) {  // each rank begins with another peer, so that no link gets all at once
        int peer = p.peers.rank + k;
        peer -= peer >= p.peers.world ? p.peers.world : 0;
        ptx::StoreSystem(Slot(peer, p.peers.rank, generation) + row * words + i, *reinterpret_cast<const uint4*>(&x));
      }
    }
  }

  /// Put sentinels back into what the previous call used.
  __device__ __forceinline__ void Reset(uint32_t block, uint32_t blocks) const {
    const uint32_t previous = (generation + GENERATIONS - 1) % GENERATIONS;
    const uint32_t used = *const_cast<const volatile uint32_t*>(&head->used[previous]);
    for (int source = 0; source < p.peers.world; ++source) {
      uint4* const slot = Slot(p.peers.rank, source, previous);
      for (uint32_t i = block * blockDim.x + threadIdx.x; i < used; i += blocks * blockDim.x) {
        slot[i] = uint4{SENTINEL, SENTINEL, SENTINEL, SENTINEL};
      }
    }
  }

  static __device__ __forceinline__ bool HasArrived(const uint4& x) {
    return x.x != SENTINEL && x.y != SENTINEL && x.z != SENTINEL && x.w != SENTINEL;
  }

  /// Return 16 bytes of the data of rank `source`, when they are there.
  __device__ __forceinline__ uint4 Receive(int source, int64_t row, uint32_t i) {
    const uint4* const from = Slot(p.peers.rank, source, generation) + row * words + i;
    uint4 x = ptx::LoadSystem(from);
    if (HasArrived(x)) return x;
    uint64_t start = 0;
    for (uint32_t polls = 1; !HasArrived(x) && !has_given_up; ++polls) {
      x = ptx::LoadSystem(from);
      if (polls % 1024 == 0 && p.timeout_ns != 0) Watch(source, row, start);
    }
    return x;
  }

  __device__ void Watch(int source, int64_t row, uint64_t& start) {
    const uint64_t now = ptx::GlobalTimer();
    start = start == 0 ? now : start;
    const uint32_t other = ptx::LoadSystem(&head->aborted);
    if (other == 0 && now - start < p.timeout_ns) return;
    has_given_up = true;
    const uint32_t late = other != 0 ? other - 1 : uint32_t(source);
    if (p.record != nullptr) {
      ptx::StoreSystem(p.record + kRecordRank, late);
      ptx::StoreSystem(p.record + kRecordCall, head->call + 1);
      ptx::StoreSystem(p.record + kRecordRow, uint32_t(row));
      __threadfence_system();
      ptx::StoreSystem(p.record + kRecordFound, 1u);
    }
    for (int peer = 0; peer < p.peers.world; ++peer) {
      ptx::StoreSystem(&reinterpret_cast<DeviceHead*>(p.peers.memory[peer])->aborted, 1 + late);
    }
  }

  /// Sum of all ranks in fp32, in rank order, rounded to T. Words of several ranks are loaded before any is looked at: a
  /// load from L2 takes 0.7 us, and one after the other they were most of the time of a row (8 ranks).
  __device__ __forceinline__ V Sum(int64_t row, uint32_t i) {
    constexpr int AT_ONCE = 4;
    float sum[VEC] = {};
    for (int first = 0; first < p.peers.world; first += AT_ONCE) {
      uint4 raw[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        if (first + k < p.peers.world) {
          raw[k] = ptx::LoadSystem(Slot(p.peers.rank, first + k, generation) + row * words + i);
        }
      }
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        if (first + k >= p.peers.world) continue;
        if (!HasArrived(raw[k])) raw[k] = Receive(first + k, row, i);
        const V& x = reinterpret_cast<const V&>(raw[k]);
#pragma unroll
        for (int j = 0; j < VEC; ++j) sum[j] += x.Float(j);
      }
    }
    return RoundTo<T, VEC>(sum);
  }

  /// Sum one row and write what follows from it. All threads of the CTA call it. A row that the CTA holds at once, 16
  /// bytes per thread, stays in registers.
  __device__ __forceinline__ void Reduce(int64_t row, float* scratch) {
    const bool is_fused = p.residual_out != nullptr, is_held = words <= blockDim.x;
    V held = V::Zero();
    float squares = 0.f;
    for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
      const int64_t at = row * p.hidden + i * VEC;
      const V residual = is_fused ? V::Load(p.residual_in + at) : V::Zero();
      const V sum = Total(row, i);
      if (p.output != nullptr) sum.Store(p.output + at);
      if (!is_fused) continue;
      float x[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) x[j] = sum.Float(j) + residual.Float(j);
      held = RoundTo<T, VEC>(x);
      held.Store(p.residual_out + at);
#pragma unroll
      for (int j = 0; j < VEC; ++j) squares += held.Float(j) * held.Float(j);
    }
    if (!is_fused) return;
    V gamma = V::Zero();
    if (is_held && threadIdx.x < words) gamma = V::Load(p.gamma + threadIdx.x * VEC);  // while the sum goes round
    const float rstd = rsqrtf(BlockSum(squares, scratch) / float(p.hidden) + p.eps);
    float factor = 1.f;
    if (p.quant_out != nullptr && p.scale_out == nullptr && p.packed_out == nullptr)
      factor = 1.f / (p.scale != nullptr ? *p.scale : p.scale_value);
    float amax = 0.f;
    for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
      float x[VEC];
      const V norm = is_held ? NormOf(held, gamma, rstd) : Norm(row, i, rstd);
      if (p.norm_out != nullptr) norm.Store(p.norm_out + row * p.hidden + i * VEC);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        x[j] = norm.Float(j) * factor;
        amax = AbsMax(amax, x[j]);
      }
      if constexpr (IS_FP4) StoreFp4(row, i, x);
      if (p.packed_out != nullptr) {
        StorePacked(row, i, x);
      } else if (p.quant_out != nullptr && p.scale_out == nullptr) {
        StoreQuantised(row, i, x);
      }
    }
    if (p.scale_out == nullptr) {
      __syncthreads();  // the next row uses `scratch` again
      return;
    }
    amax = BlockAbsMax(amax, scratch + 32);
    const float scale = (amax < SMALLEST_AMAX ? SMALLEST_AMAX : amax) / E4M3_LARGEST;  // NaN stays NaN
    if (threadIdx.x == 0) p.scale_out[row] = scale;
    for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
      float x[VEC];
      const V norm = is_held ? NormOf(held, gamma, rstd) : Norm(row, i, rstd);
#pragma unroll
      for (int j = 0; j < VEC; ++j) x[j] = __fdiv_rn(norm.Float(j), scale);
      StoreQuantised(row, i, x);
    }
    __syncthreads();
  }

  __device__ __forceinline__ V NormOf(const V& x, const V& gamma, float rstd) const {
    float y[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) y[j] = x.Float(j) * rstd * (p.weight_bias + gamma.Float(j));
    return RoundTo<T, VEC>(y);
  }

  /// Norm of 16 bytes of the row, from the residual that this thread has written.
  __device__ __forceinline__ V Norm(int64_t row, uint32_t i, float rstd) const {
    return NormOf(V::Load(p.residual_out + row * p.hidden + i * VEC), V::Load(p.gamma + i * VEC), rstd);
  }

  __device__ __forceinline__ void StoreQuantised(int64_t row, uint32_t i, const float (&x)[VEC]) const {
    StoreFp8<VEC>(reinterpret_cast<uint8_t*>(p.quant_out) + row * p.hidden + i * VEC, x, __NV_E4M3);
  }

  /// Quantise 16 bytes of a row to FP4; the neighbouring lane has the other half of the block of 16.
  __device__ __forceinline__ void StoreFp4(int64_t row, uint32_t i, const float (&x)[VEC]) const {
    static_assert(2 * VEC == FP4_BLOCK, "a block is two vectors of a 16-bit type");
    const float factor = p.scale != nullptr ? *p.scale : p.scale_value;
    float amax = 0.f;
#pragma unroll
    for (int j = 0; j < VEC; ++j) amax = fmaxf(amax, fabsf(x[j]));
    amax = fmaxf(amax, __shfl_xor_sync(3u << (threadIdx.x % 32 & ~1u), amax, 1));
    const __nv_fp8_storage_t scale =
        __nv_cvt_float_to_fp8(__fdiv_rn(factor * amax, E2M1_LARGEST), __NV_SATFINITE, __NV_E4M3);
    uint32_t codes = 0;
    if ((scale & 0x7F) != 0) {
      const float multiple = __fdiv_rn(factor, __half2float(__half(__nv_cvt_fp8_to_halfraw(scale, __NV_E4M3))));
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        codes |= (RoundToE2M1(fabsf(x[j]) * multiple) | ((__float_as_uint(x[j]) >> 28) & 8)) << (4 * j);
      }
    }
    reinterpret_cast<uint32_t*>(p.fp4_out)[row * words + i] = codes;
    if (i % 2 != 0) return;
    const int64_t block = i / 2;
    p.fp4_scales[p.fp4_grid.Index(row, block)] = scale;
    if (i + 2 < words) return;
    for (int64_t pad = block + 1; pad < p.fp4_grid.PaddedCols(); ++pad) p.fp4_scales[p.fp4_grid.Index(row, pad)] = 0;
  }

  /// Quantise 16 bytes of a row with the exponent of their group, of which neighbouring lanes have the rest.
  __device__ __forceinline__ void StorePacked(int64_t row, uint32_t i, float (&x)[VEC]) const {
    const uint32_t width = uint32_t(p.group) / VEC, lane = threadIdx.x % 32;
    const uint32_t lanes = (width == 32 ? 0xffffffffu : (1u << width) - 1) << (lane / width * width);
    float amax = 0.f;
#pragma unroll
    for (int j = 0; j < VEC; ++j) amax = AbsMax(amax, x[j]);
    for (uint32_t offset = width / 2; offset > 0; offset /= 2) {
      amax = AbsMax(amax, __shfl_xor_sync(lanes, amax, offset));
    }
    const float wanted = __fdiv_rn(amax, E4M3_LARGEST);
    const uint32_t bits = __float_as_uint(wanted < SMALLEST_SCALE ? SMALLEST_SCALE : wanted);
    const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
    const float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int j = 0; j < VEC; ++j) x[j] *= inverse;
    StoreQuantised(row, i, x);
    if (lane % width != 0) return;
    const uint32_t group = i / width, groups = words / width;
    uint8_t* const word = p.packed_out + 4 * (row + group / 4 * p.packed_stride);
    word[group % 4] = uint8_t(exponent);
    if (group + 1 == groups) {
      for (uint32_t k = groups % 4; k % 4 != 0; ++k) word[k] = 0;
    }
    if (row + 1 == p.tokens && group % 4 == 0 && group + 4 < groups) {  // rows that only fill up the column
      for (int64_t r = 1; r < p.packed_stride - row; ++r) reinterpret_cast<uint32_t*>(word)[r] = 0;
    }
  }

  static __device__ __forceinline__ float AbsMax(float most, float x) {
    x = fabsf(x);
    return x > most || x != x ? x : most;
  }

  static __device__ __forceinline__ float BlockAbsMax(float x, float* scratch) {
    for (int offset = 16; offset > 0; offset /= 2) x = AbsMax(x, __shfl_xor_sync(0xffffffffu, x, offset));
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = lane * 32 < int(blockDim.x) ? scratch[lane] : 0.f;
    for (int offset = 16; offset > 0; offset /= 2) x = AbsMax(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
  }

  /// The call of CTA `block` of `blocks`.
  __device__ __forceinline__ void Run(uint32_t block, uint32_t blocks, float* scratch) {
    for (int64_t row = block; row < p.tokens; row += blocks) {
      if constexpr (IS_TWO_SHOT) {
        PushToOwner(row);
      } else {
        Push(row);
      }
    }
    if (p.trigger_early) ptx::LaunchDependents();
    Reset(block, blocks);
    int64_t rows = p.tokens;  // rows of each slot that this call uses
    if constexpr (IS_TWO_SHOT) {
      rows = 2 * RowsOfOwner();
      const int64_t owned = min(RowsOfOwner(), p.tokens - p.peers.rank * RowsOfOwner());
      for (int64_t row = block; row < owned; row += blocks) PushSum(row);
    }
    for (int64_t row = block; row < p.tokens; row += blocks) Reduce(row, scratch);
    __threadfence_system();  // sentinels are in place before any store of this rank's next call
    __syncthreads();
    if (threadIdx.x != 0 || ptx::AddOrdered(&head->arrived, 1) != int32_t(blocks) - 1) return;
    head->used[generation] = uint32_t(rows * words);
    head->generation = (generation + 1) % GENERATIONS;
    head->arrived = 0;
    head->call += 1;
  }
};

constexpr int ONE_SHOT_THREADS = 1024;

template <typename T, bool IS_TWO_SHOT, bool IS_FP4 = false>
__global__ void __launch_bounds__(ONE_SHOT_THREADS, 1) OneShotKernel(const __grid_constant__ AllReduceParams<T> p) {
  __shared__ float scratch[64];
  ptx::GridDependencyWait();
  OneShot<T, IS_TWO_SHOT, IS_FP4>(p).Run(blockIdx.x, gridDim.x, scratch);
}

/// Threads of a CTA: a function of the row alone, because the order of the sum of squares depends on it.
inline int OneShotThreads(int64_t hidden, int vec) { return BlockThreads(hidden, vec); }

template <typename T>
cudaError_t AllReduce(const AllReduceParams<T>& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  const dim3 grid(unsigned(std::min<int64_t>(p.tokens, p.max_blocks))),
      block(OneShotThreads(p.hidden, OneShot<T>::VEC));
  if constexpr (sizeof(T) == 2) {
    if (p.fp4_out != nullptr) {
      auto kernel = p.is_two_shot ? OneShotKernel<T, true, true> : OneShotKernel<T, false, true>;
      return Launch(kernel, grid, block, p.enable_pdl, stream, p);
    }
  }
  if (p.is_two_shot) return Launch(OneShotKernel<T, true>, grid, block, p.enable_pdl, stream, p);
  return Launch(OneShotKernel<T, false>, grid, block, p.enable_pdl, stream, p);
}

}  // namespace comm
}  // namespace flashinfer
