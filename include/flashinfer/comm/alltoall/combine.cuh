// SPDX-License-Identifier: Apache-2.0
// Combine of the one-sided exchange on CUDA; what is exchanged and why two flags suffice: params.h.
// Rows that are not in shared memory yet are copied by a kernel of their own, whose last CTA sends the flags. Then each CTA
// waits for all flags, and reads and adds the rows of one token at a time.
// Bound by the link: a row arrives from each rank that a token went to.
//   test  pytest tests/comm/test_alltoall.py tests/comm/test_alltoall_gpu.py
//   bench  python benchmarks/bench_comm.py
#pragma once
#include "../../ptx/pdl.cuh"
#include "../../vec_dtypes.cuh"
#include "wait.cuh"

namespace flashinfer {
namespace comm {

__device__ inline void SendCombineFlags(const ExchangeTable& t, uint32_t call) {
  for (int r = threadIdx.x; r < t.world; r += blockDim.x) {
    if (t.IsActive(r)) ptx::StoreReleaseSystem(t.At<uint32_t>(r, kCombineFlags) + t.rank, call);
  }
}

/// Copy received rows' results to where the peers read them, or convert them in place to e4m3; then send the flags.
template <typename T>
__global__ void __launch_bounds__(EXCHANGE_THREADS) ShowRowsKernel(const __grid_constant__ CombineParams<T> p) {
  constexpr int VEC = 16 / sizeof(T);
  ptx::GridDependencyWait();
  const ExchangeTable& t = p.table;
  ExchangeHead* const head = t.Head(t.rank);
  const uint32_t call = *const_cast<const volatile uint32_t*>(&head->call);
  const int32_t* const counts = t.At<int32_t>(t.rank, kRecvCounters);
  const int64_t chunk = int64_t(blockDim.x) * VEC;
  for (int64_t row = blockIdx.x; row < p.rows * t.world; row += gridDim.x) {
    if (row % p.rows >= counts[row / p.rows]) continue;
    T* const to = reinterpret_cast<T*>(t.Of(t.rank) + p.offset) + row * p.hidden;
    const T* const from = p.payload == nullptr ? to : p.payload + row * p.hidden;
    for (int64_t base = 0; base < p.hidden; base += chunk) {  // in place: what is written has been read
      const int64_t i = base + int64_t(threadIdx.x) * VEC;
      Vec<T, VEC> x = i < p.hidden ? Vec<T, VEC>::Load(from + i) : Vec<T, VEC>::Zero();
      if (p.is_e4m3) {
        __syncthreads();
        float y[VEC];
#pragma unroll
        for (int j = 0; j < VEC; ++j) y[j] = x.Float(j);
        if (i < p.hidden) StoreFp8<VEC>(reinterpret_cast<uint8_t*>(to) + i, y, __NV_E4M3);
      } else if (i < p.hidden) {
        x.Store(to + i);
      }
    }
    __syncthreads();
  }
  if (!IsLastCta(head)) return;
  SendCombineFlags(t, call);
  if (threadIdx.x == 0) head->arrived = 0;
}

template <typename T>
__global__ void __launch_bounds__(EXCHANGE_THREADS) CombineKernel(const __grid_constant__ CombineParams<T> p) {
  constexpr int VEC = 16 / sizeof(T);
  using V = Vec<T, VEC>;
  ptx::GridDependencyWait();
  const ExchangeTable& t = p.table;
  const uint32_t call = *const_cast<const volatile uint32_t*>(&t.Head(t.rank)->call);
  const bool is_shown = p.payload != nullptr || p.is_e4m3;  // ShowRowsKernel shows the rows, with the flags
  if (!is_shown && blockIdx.x == 0) SendCombineFlags(t, call);
  for (int r = threadIdx.x; r < t.world; r += blockDim.x) {
    if (t.IsActive(r)) WaitForFlag(t, p.wait, kCombineFlags, r, call, kWaitCombine);
  }
  __syncthreads();

  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const T* rows[MAX_TOP_K];
    int count = 0;
    for (int k = 0; k < p.top_k; ++k) {
      const int target = t.At<int32_t>(t.rank, kTargetRanks)[token * p.top_k + k];
      if (target < 0 || !t.IsActive(target)) continue;
      const int64_t row = t.rank * p.rows + t.At<int32_t>(t.rank, kSendIndices)[token * p.top_k + k];
      rows[count++] = reinterpret_cast<const T*>(t.Of(target) + p.offset) + row * p.hidden;
    }
    for (int64_t i = int64_t(threadIdx.x) * VEC; i < p.hidden; i += int64_t(blockDim.x) * VEC) {
      float sum[VEC] = {};
      for (int k = 0; k < count; ++k) {
        if (p.is_e4m3) {
          const auto x = Vec<__nv_fp8_e4m3, VEC>::Load(reinterpret_cast<const __nv_fp8_e4m3*>(rows[k]) + i);
#pragma unroll
          for (int j = 0; j < VEC; ++j) sum[j] += float(x[j]);
        } else {
          const V x = V::Load(rows[k] + i);
#pragma unroll
          for (int j = 0; j < VEC; ++j) sum[j] += x.Float(j);
        }
      }
      RoundTo<T, VEC>(sum).Store(p.out + token * p.hidden + i);
    }
  }
}

template <typename T>
cudaError_t Combine(const CombineParams<T>& p, cudaStream_t stream) {
  const dim3 block(EXCHANGE_THREADS);
  if (p.payload != nullptr || p.is_e4m3) {
    const dim3 grid = ExchangeGrid(p.rows * p.table.world, p.wait.max_blocks);
    const cudaError_t status = Launch(ShowRowsKernel<T>, grid, block, p.wait.enable_pdl, stream, p);
    if (status != cudaSuccess) return status;
  }
  return Launch(CombineKernel<T>, ExchangeGrid(p.tokens, p.wait.max_blocks), block, p.wait.enable_pdl, stream, p);
}

}  // namespace comm
}  // namespace flashinfer
