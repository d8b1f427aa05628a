// SPDX-License-Identifier: Apache-2.0
// Parts of the kernels of an exchange: waiting for flags of peers, with an end; finding the last block; the grid.
#pragma once
#include "../../ptx/atomic.cuh"
#include "../../ptx/globaltimer.cuh"
#include "../../ptx/system.cuh"
#include "../../utils.cuh"
#include "params.h"

namespace flashinfer {
namespace comm {

constexpr int EXCHANGE_THREADS = 256;

/// Leave what was waited for in vain on the host, and tell the peers.
__device__ inline void GiveUp(const ExchangeTable& t, const ExchangeWait& wait, uint32_t rank, uint32_t call,
                              Stage stage) {
  if (wait.record != nullptr) {
    ptx::StoreSystem(wait.record + 1, rank);
    ptx::StoreSystem(wait.record + 2, call);
    ptx::StoreSystem(wait.record + 3, uint32_t(stage));
    __threadfence_system();
    ptx::StoreSystem(wait.record, 1u);
  }
  if (stage == kRequestsDiffer) return;  // the peers find the same
  for (int peer = 0; peer < t.world; ++peer) {
    if (t.IsActive(peer)) ptx::StoreSystem(&t.Head(peer)->aborted, 1 + rank);
  }
}

/// Wait for the flag of one peer; return false if it does not come.
__device__ inline bool WaitForFlag(const ExchangeTable& t, const ExchangeWait& wait, Meta flags, int peer,
                                   uint32_t call, Stage stage) {
  const uint32_t* const flag = t.At<uint32_t>(t.rank, flags) + peer;
  uint64_t start = 0;
  for (uint32_t polls = 1; int32_t(ptx::LoadAcquireSystem(flag) - call) < 0; ++polls) {
    if (polls % 1024 != 0 || wait.timeout_ns == 0) continue;
    const uint64_t now = ptx::GlobalTimer();
    start = start == 0 ? now : start;
    const uint32_t other = ptx::LoadSystem(&t.Head(t.rank)->aborted);
    if (other == 0 && now - start < wait.timeout_ns) continue;
    GiveUp(t, wait, other != 0 ? other - 1 : uint32_t(peer), call, stage);
    return false;
  }
  return true;
}

/// Return true in the last CTA of the grid to come here; it sees what all CTAs wrote before. All threads call it.
__device__ inline bool IsLastCta(ExchangeHead* head) {
  __shared__ bool is_last;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) is_last = ptx::AddOrdered(&head->arrived, 1) == int32_t(gridDim.x) - 1;
  __syncthreads();
  return is_last;
}

/// CTAs of a kernel: one per row of work, so that ranks that are streams of one device all fit.
inline dim3 ExchangeGrid(int64_t work, int max_blocks) {
  return dim3(unsigned(std::max<int64_t>(1, std::min<int64_t>(work, max_blocks))));
}

}  // namespace comm
}  // namespace flashinfer
