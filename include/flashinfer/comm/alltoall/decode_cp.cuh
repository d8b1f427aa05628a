// SPDX-License-Identifier: Apache-2.0
// Exchange of partial attention between ranks with parts of a context, as it is or merged; layout and formula in params.h,
//   merged  sum_p w_p o_p / sum_p w_p,  w_p = 2^(lse_p - max), or e^; an LSE of NaN or +inf counts as -inf, no rows give 0
// All CTAs store the parts of their rows into the slots of their owners; the last one sends the flags; then all wait for
// those of the peers, so they must be resident together: one per row, no more than multiprocessors. A call uses the slots
// of its parity: a rank writes there again two calls later, after it has received what the peers sent behind this call.
//   test  pytest tests/comm/test_dcp_alltoall.py
//   bench  python benchmarks/bench_comm.py
#pragma once
#include "../../ptx/pdl.cuh"
#include "../../vec_dtypes.cuh"
#include "wait.cuh"

namespace flashinfer {
namespace comm {

constexpr int DECODE_CP_THREADS = 128;

template <typename Unit>
__device__ __forceinline__ void CopyBytes(const char* from, char* to, int64_t bytes) {
  for (int64_t i = threadIdx.x; i < bytes / int64_t(sizeof(Unit)); i += blockDim.x) {
    reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
  }
}

/// Merge the parts of one row.
template <typename T>
__device__ __forceinline__ void MergeRow(const DecodeCpParams& p, uint32_t call, int64_t row) {
  constexpr int VEC = 16 / sizeof(T);
  const ExchangeTable& t = p.table;
  const auto lse_of = [&](int source) {
    const float* const all = reinterpret_cast<const float*>(p.Slot(t.rank, source, call) + p.rows * p.o_bytes);
    const float x = all[row] * (p.is_base_e ? 1.442695040888963f : 1.f);
    return x < INFINITY ? x : -INFINITY;  // NaN as well
  };
  float most = -INFINITY, total = 0.f;
  for (int source = 0; source < t.world; ++source) most = fmaxf(most, lse_of(source));
  if (most > -INFINITY) {
    for (int source = 0; source < t.world; ++source) total += exp2f(lse_of(source) - most);
  }
  for (int64_t i = threadIdx.x; i < p.o_bytes / 16; i += blockDim.x) {
    float sum[VEC] = {};
    for (int source = 0; total > 0.f && source < t.world; ++source) {
      const float weight = exp2f(lse_of(source) - most) / total;
      if (weight == 0.f) continue;
      const auto x =
          Vec<T, VEC>::Load(reinterpret_cast<const T*>(p.Slot(t.rank, source, call) + row * p.o_bytes) + i * VEC);
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum[j] += weight * x.Float(j);
    }
    RoundTo<T, VEC>(sum).Store(reinterpret_cast<T*>(p.out_o + row * p.o_bytes) + i * VEC);
  }
}

template <typename T>
__global__ void __launch_bounds__(DECODE_CP_THREADS) DecodeCpKernel(const __grid_constant__ DecodeCpParams p) {
  ptx::GridDependencyWait();
  const ExchangeTable& t = p.table;
  ExchangeHead* const head = t.Head(t.rank);
  const uint32_t call = *const_cast<const volatile uint32_t*>(&head->call) + 1;
  for (int64_t part = blockIdx.x; part < p.rows * t.world; part += gridDim.x) {
    const int64_t row = part / t.world;
    char* const slot = p.Slot(int(part % t.world), t.rank, call);
    CopyBytes<uint4>(p.o + part * p.o_bytes, slot + row * p.o_bytes, p.o_bytes);
    CopyBytes<uint32_t>(p.stats + part * p.stats_bytes, slot + p.rows * p.o_bytes + row * p.stats_bytes, p.stats_bytes);
  }
  if (IsLastCta(head)) {
    for (int r = threadIdx.x; r < t.world; r += blockDim.x) {
      ptx::StoreReleaseSystem(t.At<uint32_t>(r, kDispatchFlags) + t.rank, call);
    }
  }
  for (int r = threadIdx.x; r < t.world; r += blockDim.x)
    WaitForFlag(t, p.wait, kDispatchFlags, r, call, kWaitDispatch);
  __syncthreads();
  if (p.out_stats == nullptr) {
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) MergeRow<T>(p, call, row);
  } else {
    for (int64_t part = blockIdx.x; part < p.rows * t.world; part += gridDim.x) {
      const int64_t row = part / t.world;
      const char* const slot = p.Slot(t.rank, int(part % t.world), call);
      CopyBytes<uint4>(slot + row * p.o_bytes, p.out_o + part * p.o_bytes, p.o_bytes);
      CopyBytes<uint32_t>(slot + p.rows * p.o_bytes + row * p.stats_bytes, p.out_stats + part * p.stats_bytes,
                          p.stats_bytes);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0 || ptx::AddOrdered(&head->arrived, 1) != 2 * int32_t(gridDim.x) - 1) return;
  head->arrived = 0;
  head->call = call;
}

template <typename T>
cudaError_t DecodeCpExchange(const DecodeCpParams& p, cudaStream_t stream) {
  const dim3 grid = ExchangeGrid(p.rows * p.table.world, p.wait.max_blocks);
  return Launch(DecodeCpKernel<T>, grid, dim3(DECODE_CP_THREADS), p.wait.enable_pdl, stream, p);
}

}  // namespace comm
}  // namespace flashinfer
