// SPDX-License-Identifier: Apache-2.0
// Comparison of what the ranks ask for, in front of an all-reduce (FLASHINFER_COMM_CHECK): every rank writes a digest of
// its call to all, waits for theirs and compares, before anything else is written. The host waits for it.
//   one warp; thread r serves rank r.  digest -> rank r,  flag of this check -> rank r,  wait for r's flag,  compare
// Two checks have room: a rank that has found a difference may enter the next check before another has compared.
//   test  pytest tests/comm/test_emulated_exchanges.py      bench  none: it runs to find a mistake, and the host waits
#pragma once
#include "../../ptx/globaltimer.cuh"
#include "../../ptx/system.cuh"
#include "../../utils.cuh"
#include "params.h"

namespace flashinfer {
namespace comm {

/// Words of the check in the head of a rank's memory, behind DeviceHead.
struct CheckHead {
  uint32_t digests[2][MAX_RANKS];
  uint32_t flags[MAX_RANKS];
  uint32_t checks;  ///< checks that are done
};
constexpr int CHECK_OFFSET = 128;
static_assert(CHECK_OFFSET + sizeof(CheckHead) <= HEAD_BYTES, "the check must fit in the head");

/// The check of one rank, by one warp.
__device__ __forceinline__ void CompareCalls(const CheckParams& p) {
  const auto head = [&](int rank) { return reinterpret_cast<CheckHead*>(p.peers.memory[rank] + CHECK_OFFSET); };
  CheckHead* const own = head(p.peers.rank);
  const uint32_t check = *const_cast<const volatile uint32_t*>(&own->checks) + 1;
  const int rank = int(threadIdx.x);
  bool is_late = false, differs = false;
  if (rank < p.peers.world) {
    ptx::StoreSystem(&head(rank)->digests[check & 1][p.peers.rank], p.digest);
    __threadfence_system();
    ptx::StoreReleaseSystem(&head(rank)->flags[p.peers.rank], check);
    uint64_t start = 0;
    for (uint32_t polls = 1; int32_t(ptx::LoadAcquireSystem(&own->flags[rank]) - check) < 0 && !is_late; ++polls) {
      if (polls % 1024 != 0 || p.timeout_ns == 0) continue;
      const uint64_t now = ptx::GlobalTimer();
      start = start == 0 ? now : start;
      is_late = now - start >= p.timeout_ns;
    }
    differs = !is_late && ptx::LoadSystem(&own->digests[check & 1][rank]) != p.digest;
  }
  const uint32_t late = __ballot_sync(0xffffffffu, is_late), other = __ballot_sync(0xffffffffu, differs);
  if (rank != 0) return;
  own->checks = check;
  if ((late | other) == 0) return;
  ptx::StoreSystem(p.record + 1, uint32_t(__ffs(int(late != 0 ? late : other)) - 1));
  ptx::StoreSystem(p.record + 2, check);
  __threadfence_system();
  ptx::StoreSystem(p.record, late != 0 ? 1u : 2u);
}

__global__ void __launch_bounds__(32) CheckKernel(const __grid_constant__ CheckParams p) { CompareCalls(p); }

FLASHINFER_INLINE cudaError_t Check(const CheckParams& p, cudaStream_t stream) {
  return Launch(CheckKernel, dim3(1), dim3(32), false, stream, p);
}

}  // namespace comm
}  // namespace flashinfer
