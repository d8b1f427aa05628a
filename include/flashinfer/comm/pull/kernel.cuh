// SPDX-License-Identifier: Apache-2.0
// All-reduce that reads the inputs of the peers, on CUDA; protocol in params.h. 16 bytes per thread and turn.
// All CTAs of a rank must be resident together, because each waits for flags that the last one of a peer sends.
// Bound by the link: one-shot reads (P - 1) times the message, two-shot 2 (P - 1) / P times.
//   test  pytest tests/comm/test_vllm_ar.py tests/comm/test_emulated_exchanges.py
//   bench  python benchmarks/bench_comm.py -k vllm
#pragma once
#include "../../ptx/atomic.cuh"
#include "../../ptx/globaltimer.cuh"
#include "../../ptx/system.cuh"
#include "../../utils.cuh"
#include "../../vec_dtypes.cuh"
#include "params.h"

namespace flashinfer {
namespace comm {

template <typename T>
struct PullKernelBody {
  static constexpr int VEC = 16 / sizeof(T);
  using V = Vec<T, VEC>;
  using Flags = uint32_t (PullHead::*)[MAX_RANKS];

  const PullParams<T>& p;
  PullHead* const head;
  const uint32_t call;

  __device__ __forceinline__ explicit PullKernelBody(const PullParams<T>& params)
      : p(params), head(params.Head(params.peers.rank)), call(*const_cast<const volatile uint32_t*>(&head->call) + 1) {}

  /// Tell all peers, by one thread each.
  __device__ __forceinline__ void Tell(Flags flags) const {
    if (int(threadIdx.x) >= p.peers.world) return;
    ptx::StoreReleaseSystem(&(p.Head(int(threadIdx.x))->*flags)[p.peers.rank], call);
  }

  /// Wait for all peers, by one thread each. All threads call it.
  __device__ __forceinline__ void Meet(Flags flags) const {
    if (int(threadIdx.x) < p.peers.world) {
      const uint32_t* const flag = &(head->*flags)[threadIdx.x];
      uint64_t start = 0;
      for (uint32_t polls = 1; int32_t(ptx::LoadAcquireSystem(flag) - call) < 0; ++polls) {
        if (polls % 1024 == 0 && p.timeout_ns != 0 && Watch(threadIdx.x, start)) break;
      }
    }
    __syncthreads();
  }

  /// Return true if it is time to give up; the host and the peers are told.
  __device__ bool Watch(uint32_t rank, uint64_t& start) const {
    const uint64_t now = ptx::GlobalTimer();
    start = start == 0 ? now : start;
    const uint32_t other = ptx::LoadSystem(&head->aborted);
    if (other == 0 && now - start < p.timeout_ns) return false;
    const uint32_t late = other != 0 ? other - 1 : rank;
    if (p.record != nullptr) {
      ptx::StoreSystem(p.record + 1, late);
      ptx::StoreSystem(p.record + 2, call);
      __threadfence_system();
      ptx::StoreSystem(p.record, 1u);
    }
    for (int peer = 0; peer < p.peers.world; ++peer) ptx::StoreSystem(&p.Head(peer)->aborted, 1 + late);
    return true;
  }

  /// Sum of 16 bytes of all inputs.
  __device__ __forceinline__ V Sum(int64_t i) const {
    float sum[VEC] = {};
    for (int r = 0; r < p.peers.world; ++r) {
      const uint4 raw = ptx::LoadSystem(reinterpret_cast<const uint4*>(p.inputs[r]) + i);
      const V& x = reinterpret_cast<const V&>(raw);
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum[j] += x.Float(j);
    }
    return RoundTo<T, VEC>(sum);
  }

  /// Return true in all threads of the last CTA to come here.
  __device__ __forceinline__ bool IsLast(int32_t* counter, int blocks) const {
    __shared__ bool is_last;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) is_last = ptx::AddOrdered(counter, 1) == blocks - 1;
    __syncthreads();
    return is_last;
  }

  /// The call of CTA `block` of `blocks`.
  __device__ __forceinline__ void Run(int block, int blocks) const {
    const int64_t words = p.size / VEC, first = int64_t(block) * blockDim.x + threadIdx.x;
    const int64_t step = int64_t(blocks) * blockDim.x;
    if (block == 0) Tell(&PullHead::enter);
    Meet(&PullHead::enter);
    if (!p.is_two_shot) {
      for (int64_t i = first; i < words; i += step) Sum(i).Store(p.out + i * VEC);
      if (!IsLast(&head->arrived, blocks)) return;
      Tell(&PullHead::leave);
      Meet(&PullHead::leave);
    } else {
      const int64_t share = (words + p.peers.world - 1) / p.peers.world, begin = p.peers.rank * share;
      const auto scratch = [&](int r) { return reinterpret_cast<T*>(p.peers.memory[r] + PULL_HEAD_BYTES); };
      for (int64_t i = first; i < min(share, words - begin); i += step) {
        Sum(begin + i).Store(scratch(p.peers.rank) + i * VEC);
      }
      if (IsLast(&head->arrived, blocks)) Tell(&PullHead::leave);
      Meet(&PullHead::leave);
      for (int64_t i = first; i < words; i += step) {
        const uint32_t owner =
            uint32_t(i) / uint32_t(share);  // a division of 64 bits is a call, around which words are spilled
        const uint4 raw = ptx::LoadSystem(reinterpret_cast<const uint4*>(scratch(int(owner))) + (i - owner * share));
        reinterpret_cast<const V&>(raw).Store(p.out + i * VEC);
      }
      if (!IsLast(&head->left, blocks)) return;
    }
    if (threadIdx.x != 0) return;
    head->arrived = head->left = 0;
    head->call = call;
  }
};

constexpr int PULL_THREADS = 512;

template <typename T>
__global__ void __launch_bounds__(PULL_THREADS) PullKernel(const __grid_constant__ PullParams<T> p) {
  PullKernelBody<T>(p).Run(int(blockIdx.x), int(gridDim.x));
}

template <typename T>
cudaError_t Pull(const PullParams<T>& p, cudaStream_t stream) {
  const int64_t most = CeilDiv(p.size * int64_t(sizeof(T)) / 16, PULL_THREADS);
  const int64_t blocks = std::max<int64_t>(1, std::min<int64_t>(most, p.blocks));
  return Launch(PullKernel<T>, dim3(unsigned(blocks)), dim3(PULL_THREADS), false, stream, p);
}

}  // namespace comm
}  // namespace flashinfer
