// SPDX-License-Identifier: Apache-2.0
// The step kernel for one token of each sequence. Bound by the bytes of the states, and by latency for small batches:
// a warp shares nothing with others and waits for memory twice, for its slot and for everything else at once.
//
//   grid    (tiles of rows, value heads, sequences)
//   block   WARPS warps      warp   WARP_ROWS rows of one head      pass   4 groups of 8 lanes, ROWS rows each
//
//        slot ---> rows of the state, to registers or (BULK) by bulk copies to shared memory --.
//        k, q (16 channels of 128 in each of the 8 lanes), v  ---------------------------------+--> s.k, s.q, shuffle,
//        gates; KDA: a group computes a fourth of the decays ----------------------------------'    u = beta (v - s.k)
//                                                            s <- decay s + u k^T,  o = s.q + u (k.q)
//
// Rows are kept as they are stored and converted where they are used, which leaves registers for more warps. The dot
// products are those of the old state, so that one pass and one exchange between lanes are enough.
//   test  pytest tests/recurrent/test_gdn_decode.py      bench  python benchmarks/bench_recurrent.py
#pragma once
#include "../../device/occupancy.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/pdl.cuh"
#include "../../ptx/tma.cuh"
#include "../reduce_rows.cuh"
#include "numbers.cuh"
#include "shape.h"
#include "stage.cuh"

namespace flashinfer {
namespace recurrent {
namespace step {

/// Sum over the lanes of a row.
__device__ __forceinline__ float RowSum(float x) {
#pragma unroll
  for (int offset = COLUMNS / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/// The channels of one lane: i-th part of VEC neighbours at channel (i * COLUMNS + column) * VEC.
template <typename T, int ELEMENTS, int VEC>
struct Channels {
  static constexpr int PARTS = ELEMENTS / VEC, WIDTH = VEC * int(sizeof(T)) > 16 ? 16 / int(sizeof(T)) : VEC;
  Vec<T, WIDTH> part[ELEMENTS / WIDTH];

  __device__ __forceinline__ void Load(const T* row, int column) {
#pragma unroll
    for (int i = 0; i < ELEMENTS / WIDTH; ++i) {
      const int e = i * WIDTH;
      part[i] = Vec<T, WIDTH>::Load(row + (e / VEC * COLUMNS + column) * VEC + e % VEC);
    }
  }
  __device__ __forceinline__ float operator[](int e) const { return part[e / WIDTH].Float(e % WIDTH); }
};

/// WARP_ROWS: neighbouring rows of a warp. ROWS: rows of a lane in one pass. BLOCKS: blocks for which an SM must have
/// registers, as many as need no spills. BULK: rows go through shared memory, so that bytes in flight take no registers.
template <int K_, int ROWS_, int WARP_ROWS_, int WARPS_, int BLOCKS_, bool BULK_>
struct OneShape {
  static constexpr int K = K_, ROWS = ROWS_, WARP_ROWS = WARP_ROWS_, WARPS = WARPS_, BLOCKS = BLOCKS_;
  static constexpr bool BULK = BULK_;
  static constexpr int ELEMENTS = K / COLUMNS, TILE = WARPS * WARP_ROWS, PASS_ROWS = GROUPS * ROWS;
  static constexpr int PASSES = WARP_ROWS / PASS_ROWS;
  static_assert(BULK || PASSES == 1, "all rows of a warp are in registers at once");
  static constexpr int SharedBytes(int element) { return BULK ? TILE * K * element + WARPS * PASSES * 8 : 0; }
};

template <typename Rule, typename T, typename S, typename Shape>
__global__ void __launch_bounds__(32 * Shape::WARPS, Shape::BLOCKS)
    StepOneKernel(const __grid_constant__ StepParams p) {
  constexpr int K = Shape::K, ROWS = Shape::ROWS, ELEMENTS = Shape::ELEMENTS, VEC = 16 / sizeof(S);
  constexpr int PASSES = Shape::PASSES, PASS_ROWS = Shape::PASS_ROWS;
  [[maybe_unused]] constexpr int PASS_BYTES = PASS_ROWS * K * sizeof(S);
  constexpr bool CHANNELS = Rule::CHANNEL_DECAY, BULK = Shape::BULK;
  extern __shared__ __align__(128) uint8_t raw_shared[];
  const int lane = threadIdx.x % 32, column = lane % COLUMNS, group = lane / COLUMNS, warp = threadIdx.x / 32;
  const int head = blockIdx.y, key_head = p.key_group.Divide(head);
  const int64_t n = blockIdx.z;
  const int warp_row = blockIdx.x * Shape::TILE + warp * Shape::WARP_ROWS, row = warp_row + group;
  [[maybe_unused]] S* const tile = reinterpret_cast<S*>(raw_shared) + warp * Shape::WARP_ROWS * K;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  [[maybe_unused]] const uint32_t barriers =
      ptx::SharedAddress(raw_shared) + Shape::TILE * K * uint32_t(sizeof(S)) + warp * PASSES * 8;
  if (BULK && lane == 0) {  // a barrier for each pass, which no other warp uses
#pragma unroll
    for (int i = 0; i < PASSES; ++i) ptx::MbarrierInit(barriers + 8 * i, 1);
    ptx::MbarrierInitFence();
  }
#endif
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();

  // Everything but the states, in flight at once.
  const int64_t slot = p.initial.slots.At(n), to_slot = p.final.data != nullptr ? p.final.slots.At(n) : -1;
  Channels<T, ELEMENTS, VEC> k, q;
  k.Load(static_cast<const T*>(p.k) + p.k_stride.Offset(n, 0, key_head), column);
  q.Load(static_cast<const T*>(p.q) + p.q_stride.Offset(n, 0, key_head), column);
  const int own = row + ReducedRow<COLUMNS, ROWS>(column) * GROUPS;  // the row of a pass whose sums this lane gets
  T v[PASSES];
  const T* values = static_cast<const T*>(p.v) + p.v_stride.Offset(n, 0, head);
#pragma unroll
  for (int i = 0; i < PASSES; ++i) v[i] = values[min(own + i * PASS_ROWS, int(p.value_dim) - 1)];
  RawGates gates{};
  gates.b = LoadRaw(p.b.data, p.b.stride.Offset(n, 0, head), p.b.type);
  if (p.a_log != nullptr) gates.a_log = p.a_log[head];
  constexpr int SHARE = ELEMENTS / GROUPS;  // channels whose decay this lane computes, for all four groups
  [[maybe_unused]] T g[CHANNELS ? SHARE : 1];
  [[maybe_unused]] uint32_t g_bias[CHANNELS ? SHARE : 1];
  if constexpr (CHANNELS) {
    const T* from = static_cast<const T*>(p.g) + p.g_stride.Offset(n, 0, head);
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      const int e = group * SHARE + i, channel = (e / VEC * COLUMNS + column) * VEC + e % VEC;
      g[i] = from[channel];
      g_bias[i] = 0;
      if (p.dt_bias.data != nullptr) {
        g_bias[i] = LoadRaw(p.dt_bias.data, head * p.dt_bias.stride.head + channel, p.dt_bias.type);
      }
    }
  } else {
    gates.a = LoadRaw(p.a.data, p.a.stride.Offset(n, 0, head), p.a.type);
    if (p.dt_bias.data != nullptr) gates.bias = LoadRaw(p.dt_bias.data, head * p.dt_bias.stride.head, p.dt_bias.type);
  }

  const int64_t out = p.out_stride.Offset(n, 0, head);
  const bool writes = WritesReduced<COLUMNS, ROWS>(column);
  if (slot < p.first_slot) {
    if (!writes || !p.zero_skipped) return;
    for (int i = own; i < min(warp_row + Shape::WARP_ROWS, int(p.value_dim)); i += PASS_ROWS) {
      StoreNumber(p.out, out + i, p.out_type, 0.f);
    }
    return;
  }
  using V = Vec<S, VEC>;
  V s[ROWS][ELEMENTS / VEC];
  const S* from = static_cast<const S*>(p.initial.data) + p.initial.Offset(slot, 0, head, warp_row);
  S* const to = static_cast<S*>(p.final.data) + p.final.Offset(to_slot, 0, head, warp_row);
  if constexpr (BULK) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < PASSES; ++i) {
        ptx::MbarrierArriveExpect(barriers + 8 * i, PASS_BYTES);
        ptx::LoadBulk(ptx::SharedAddress(tile) + i * PASS_BYTES, from + i * PASS_ROWS * K, PASS_BYTES,
                      barriers + 8 * i);
      }
    }
    __syncwarp();
#endif
  } else {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < ELEMENTS / VEC; ++i) {
        s[r][i] = V::Zero();
        if (p.initial.data != nullptr && row + r * GROUPS < p.value_dim) {
          s[r][i] = V::Load(from + (group + r * GROUPS) * p.initial.row + (column + i * COLUMNS) * VEC);
        }
      }
    }
  }

  float kk = 0.f, qq = 0.f, kq = 0.f;
#pragma unroll
  for (int e = 0; e < ELEMENTS; ++e) kk += k[e] * k[e], qq += q[e] * q[e], kq += k[e] * q[e];
  kk = RowSum(kk), qq = RowSum(qq), kq = RowSum(kq);
  const float k_factor = p.normalise ? rsqrtf(kk + 1e-6f) : 1.f;
  const float q_factor = (p.normalise ? rsqrtf(qq + 1e-6f) : 1.f) * p.scale;
  const float b = DecodeRaw(gates.b, p.b.type), beta = p.beta_is_logit ? Sigmoid(b) : b;
  float decay[CHANNELS ? ELEMENTS : 1];
  if constexpr (CHANNELS) {
    float share[SHARE];
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      const float x = DecodeRaw(g_bias[i], p.dt_bias.type);
      share[i] = Exp(Rule::LogDecay(ToFloat(g[i]), gates.a_log, x, p.gate, p.lower_bound));
    }
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) {
      decay[e] = __shfl_sync(0xffffffffu, share[e % SHARE], e / SHARE * COLUMNS + column);
    }
  } else {
    const float a = DecodeRaw(gates.a, p.a.type), bias = DecodeRaw(gates.bias, p.dt_bias.type);
    decay[0] = Exp(Rule::LogDecay(a, gates.a_log, bias, p.softplus_beta, p.softplus_threshold));
  }
  const float sum_decay = CHANNELS ? 1.f : decay[0];  // one decay of a head is a factor of the sums

#pragma unroll 1  // a second copy of the code would come from memory when the cache is cold
  for (int pass = 0; pass < PASSES; ++pass) {
    [[maybe_unused]] S* const rows = tile + pass * PASS_ROWS * K;
    [[maybe_unused]] const auto read_rows = [&] {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int i = 0; i < ELEMENTS / VEC; ++i) {
          s[r][i] = V::Load(rows + (group + r * GROUPS) * K + (column + i * COLUMNS) * VEC);
        }
      }
    };
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (BULK) ptx::MbarrierWait(barriers + 8 * pass, 0);
#endif
    if constexpr (BULK) read_rows();
    // A channel of k and q is converted once for all rows.
    float sk[ROWS] = {}, sq[ROWS] = {};
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) {
      const float k_e = k[e], q_e = q[e];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float x = s[r][e / VEC].Float(e % VEC);
        if constexpr (CHANNELS) x *= decay[e];
        sk[r] += x * k_e;
        sq[r] += x * q_e;
      }
    }
    ReduceRows<COLUMNS>(sk, column);
    ReduceRows<COLUMNS>(sq, column);
    T value = v[0];
#pragma unroll
    for (int i = 1; i < PASSES; ++i) value = pass == i ? v[i] : value;
    const float u = k_factor * Rule::Correction(ToFloat(value), sk[0] * (k_factor * sum_decay), beta);
    const int own_row = own + pass * PASS_ROWS;
    if (writes && own_row < p.value_dim) {
      StoreNumber(p.out, out + own_row, p.out_type, q_factor * (sq[0] * sum_decay + u * kq));
    }
    if (to_slot < p.first_slot) continue;
    float u_of[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) u_of[r] = __shfl_sync(0xffffffffu, u, group * COLUMNS + r * (COLUMNS / ROWS));
    if constexpr (BULK) {
      __syncwarp();  // rows are read again: kept, they would take the registers of a block
      read_rows();
    }
#pragma unroll
    for (int i = 0; i < ELEMENTS / VEC; ++i) {
      float k_i[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) k_i[j] = k[i * VEC + j];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (!BULK && row + r * GROUPS >= p.value_dim) continue;
        float x[VEC];
#pragma unroll
        for (int j = 0; j < VEC; ++j) x[j] = s[r][i].Float(j) * decay[CHANNELS ? i * VEC + j : 0] + u_of[r] * k_i[j];
        const int64_t at = (group + r * GROUPS) * (BULK ? K : p.final.row) + (column + i * COLUMNS) * VEC;
        RoundTo<S, VEC>(x).Store((BULK ? rows : to) + at);
      }
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (BULK) {
      ptx::FenceAsyncProxy();
      __syncwarp();
      if (lane == 0) {
        ptx::StoreBulk(to + pass * PASS_ROWS * K, ptx::SharedAddress(rows), PASS_BYTES);
        ptx::CommitStores();
      }
    }
#endif
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (BULK && lane == 0) ptx::WaitStoresRead<0>();  // the rows must stay until they have been read
#endif
}

/// True if the rows of a block can be copied at once.
template <typename Shape>
bool CanCopyBulk(const StepParams& p) {
  return p.initial.data != nullptr && p.final.data != nullptr && p.initial.row == Shape::K && p.final.row == Shape::K &&
         p.value_dim % Shape::TILE == 0 && flashinfer::device::HasBulkCopies();
}

template <typename Rule, typename T, typename S, typename Shape>
Status LaunchOneShape(const StepParams& p, Stream stream) {
  constexpr int BYTES = Shape::SharedBytes(sizeof(S));
  constexpr auto KERNEL = StepOneKernel<Rule, T, S, Shape>;
  if constexpr (Shape::BULK) {
    const Status status = flashinfer::device::AllowShared<KERNEL, BYTES>();
    if (status != cudaSuccess) return status;
  }
  const dim3 grid(unsigned(CeilDiv(p.value_dim, Shape::TILE)), unsigned(p.value_heads), unsigned(p.sequences));
  return LaunchShared(KERNEL, grid, dim3(32 * Shape::WARPS), BYTES, p.enable_pdl, stream, p);
}

}  // namespace step
}  // namespace recurrent
}  // namespace flashinfer
