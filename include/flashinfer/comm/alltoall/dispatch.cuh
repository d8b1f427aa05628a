// SPDX-License-Identifier: Apache-2.0
// Dispatch of the one-sided exchange on CUDA; what is exchanged and why two flags suffice: params.h.
// A CTA has neighbouring tokens. Warps count where the tokens in front of them go (a ballot per 32 tokens and rank), so
// that slots are in order of token without any CTA waiting for another; then all threads copy rows. The last CTA to finish
// sends the flags and waits for those of the peers: no CTA waits that another one needs.
// Bound by the link: each token leaves once per rank it goes to, in whole 16-byte words.
//   test  pytest tests/comm/test_alltoall.py tests/comm/test_alltoall_gpu.py
//   bench  python benchmarks/bench_comm.py
#pragma once
#include "../../ptx/pdl.cuh"
#include "wait.cuh"

namespace flashinfer {
namespace comm {

template <typename Unit>
__device__ __forceinline__ void CopyRow(const char* from, char* const* to, int copies, int64_t bytes) {
  for (int64_t i = threadIdx.x; i < bytes / int64_t(sizeof(Unit)); i += blockDim.x) {
    const Unit x = reinterpret_cast<const Unit*>(from)[i];
    for (int copy = 0; copy < copies; ++copy) reinterpret_cast<Unit*>(to[copy])[i] = x;
  }
}

/// Ranks of the experts of one token, one bit each.
__device__ __forceinline__ uint64_t RanksOfToken(const DispatchParams& p, int token) {
  uint64_t ranks = 0;
  for (int k = 0; k < p.top_k; ++k) {
    const int expert = p.experts[int64_t(token) * p.top_k + k];
    if (uint32_t(expert) < uint32_t(p.num_experts)) {
      ranks |= uint64_t{1} << RankOfExpert(expert, p.num_experts, p.table.world);
    }
  }
  return ranks & p.table.active;
}

__global__ void __launch_bounds__(EXCHANGE_THREADS) DispatchKernel(const __grid_constant__ DispatchParams p) {
  constexpr int GROUP = 32;           // tokens whose slots one warp finds at a time
  __shared__ int32_t next[MAX_EP];    // slot of the next token that goes to a rank
  __shared__ uint32_t votes[MAX_EP];  // tokens of the group that go to a rank
  __shared__ int32_t targets[GROUP][MAX_TOP_K], slots[GROUP][MAX_TOP_K];
  ptx::GridDependencyWait();
  const ExchangeTable& t = p.table;
  ExchangeHead* const head = t.Head(t.rank);
  const uint32_t call = *const_cast<const volatile uint32_t*>(&head->call) + 1;
  const int begin = int(int64_t(p.tokens) * blockIdx.x / gridDim.x);
  const int end = int(int64_t(p.tokens) * (blockIdx.x + 1) / gridDim.x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;

  for (int i = threadIdx.x; i < MAX_EP; i += blockDim.x) next[i] = 0;
  __syncthreads();
  int counts[2] = {0, 0};  // rows for ranks `lane` and `lane + 32`
  for (int first = warp * GROUP; first < begin; first += warps * GROUP) {
    const uint64_t ranks = first + lane < begin ? RanksOfToken(p, first + lane) : 0;
    for (int r = 0; r < t.world; ++r) {
      const int count = __popc(__ballot_sync(0xffffffffu, ranks >> r & 1));
      if (r % 32 == lane) counts[r / 32] += count;
    }
  }
  for (int half = 0; half < 2; ++half) {
    if (counts[half] != 0) atomicAdd(&next[lane + 32 * half], counts[half]);
  }
  __syncthreads();

  for (int first = begin; first < end; first += GROUP) {
    if (warp == 0) {
      const int token = first + lane;
      const bool is_here = token < end;
      const uint64_t ranks = is_here ? RanksOfToken(p, token) : 0;
      for (int r = 0; r < t.world; ++r) {
        const uint32_t vote = __ballot_sync(0xffffffffu, ranks >> r & 1);
        if (lane == 0) votes[r] = vote;
      }
      __syncwarp();
      uint64_t left = ranks;
      for (int k = 0; is_here && k < p.top_k; ++k) {
        const int64_t at = int64_t(token) * p.top_k + k;
        const int expert = p.experts[at];
        int target = -1, slot = -1;
        if (uint32_t(expert) < uint32_t(p.num_experts)) target = RankOfExpert(expert, p.num_experts, t.world);
        if (target >= 0 && (left >> target & 1) == 0) target = -1;  // not active, or the token is there already
        if (target >= 0) {
          left &= ~(uint64_t{1} << target);
          slot = next[target] + __popc(votes[target] & ((1u << lane) - 1));
        }
        targets[lane][k] = target;
        slots[lane][k] = slot;
        t.At<int32_t>(t.rank, kTargetRanks)[at] = target;
        t.At<int32_t>(t.rank, kSendIndices)[at] = slot;
      }
      __syncwarp();
      for (int r = lane; r < t.world; r += 32) next[r] += __popc(votes[r]);
    }
    __syncthreads();
    for (int token = first; token < min(first + GROUP, end); ++token) {
      for (int i = 0; i < p.num_payloads; ++i) {
        const ExchangePayload& payload = p.payloads[i];
        char* to[MAX_TOP_K];
        int copies = 0;
        for (int k = 0; k < p.top_k; ++k) {
          const int target = targets[token - first][k];
          if (target < 0) continue;
          const int64_t row = int64_t(t.rank) * p.request.rows + slots[token - first][k];
          to[copies++] = t.Of(target) + payload.offset + row * payload.row_bytes;
        }
        const char* const from = payload.rows + int64_t(token) * payload.row_bytes;
        const int64_t unit = payload.row_bytes | payload.offset | int64_t(uintptr_t(payload.rows));
        if (unit % 16 == 0) {
          CopyRow<uint4>(from, to, copies, payload.row_bytes);
        } else if (unit % 4 == 0) {
          CopyRow<uint32_t>(from, to, copies, payload.row_bytes);
        } else {
          CopyRow<uint8_t>(from, to, copies, payload.row_bytes);
        }
      }
    }
    __syncthreads();
  }
  if (blockIdx.x == gridDim.x - 1) {
    for (int r = threadIdx.x; r < t.world; r += blockDim.x) t.At<int32_t>(t.rank, kSendCounters)[r] = next[r];
  }
  if (blockIdx.x == 0 && p.eplb_stats != nullptr) {
    const int64_t experts = t.meta[kEplbExperts];
    for (int r = 0; r < t.world; ++r) {
      if (!t.IsActive(r)) continue;
      int32_t* const to = t.At<int32_t>(r, kEplbStats) + t.rank * experts;
      for (int64_t i = threadIdx.x; i < experts; i += blockDim.x) to[i] = p.eplb_stats[i];
    }
  }
  if (!IsLastCta(head)) return;

  for (int r = threadIdx.x; r < t.world; r += blockDim.x) {
    if (!t.IsActive(r)) {
      t.At<int32_t>(t.rank, kRecvCounters)[r] = 0;
      continue;
    }
    const int32_t sent = const_cast<const volatile int32_t*>(t.At<int32_t>(t.rank, kSendCounters))[r];
    ptx::StoreSystem(t.At<uint32_t>(r, kRecvCounters) + t.rank, uint32_t(sent));
    ExchangeRequest* const request = t.Request(r, t.rank, call);
    ptx::StoreSystem(&request->rows, p.request.rows);
    ptx::StoreSystem(&request->layout, p.request.layout);
    __threadfence_system();
    ptx::StoreReleaseSystem(t.At<uint32_t>(r, kDispatchFlags) + t.rank, call);
  }
  for (int r = threadIdx.x; r < t.world; r += blockDim.x) {
    if (!t.IsActive(r) || !WaitForFlag(t, p.wait, kDispatchFlags, r, call, kWaitDispatch)) continue;
    const ExchangeRequest* const other = t.Request(t.rank, r, call);
    if (ptx::LoadSystem(&other->rows) != p.request.rows || ptx::LoadSystem(&other->layout) != p.request.layout) {
      GiveUp(t, p.wait, uint32_t(r), call, kRequestsDiffer);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  head->tokens = uint32_t(p.tokens);
  head->arrived = 0;
  head->call = call;
}

__global__ void __launch_bounds__(EXCHANGE_THREADS) SanitizeKernel(const __grid_constant__ SanitizeParams p) {
  ptx::GridDependencyWait();
  const int64_t of_rank = p.rows * p.top_k, total = of_rank * p.table.world;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += int64_t(gridDim.x) * blockDim.x) {
    const int source = int(i / of_rank);
    const int32_t count = p.table.At<int32_t>(p.table.rank, kRecvCounters)[source];
    if (i % of_rank / p.top_k >= count) p.ids[i] = p.invalid;
  }
}

FLASHINFER_INLINE cudaError_t Dispatch(const DispatchParams& p, cudaStream_t stream) {
  return Launch(DispatchKernel, ExchangeGrid(p.tokens, p.wait.max_blocks), dim3(EXCHANGE_THREADS), p.wait.enable_pdl,
                stream, p);
}

FLASHINFER_INLINE cudaError_t SanitizeExpertIds(const SanitizeParams& p, cudaStream_t stream) {
  const int64_t blocks = CeilDiv(p.rows * p.top_k * p.table.world, EXCHANGE_THREADS);
  if (blocks == 0) return cudaSuccess;
  return Launch(SanitizeKernel, ExchangeGrid(blocks, 1024), dim3(EXCHANGE_THREADS), p.enable_pdl, stream, p);
}

}  // namespace comm
}  // namespace flashinfer
