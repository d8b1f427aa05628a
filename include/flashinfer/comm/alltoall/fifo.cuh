// SPDX-License-Identifier: Apache-2.0
// Exchange of rows through first-in-first-out buffers on CUDA; layout and counters in fifo.h.
//
//   CTA g, first half    sends to rank + g, rank + g + pairs, ...       slot free? -> copy rows -> count in the peer's memory
//   CTA g, second half   takes from rank - g, rank - g - pairs, ...     slot full? -> copy rows -> count in the peer's memory
//
// With fewer CTAs than peers nothing can lock up: every rank goes through distances g in the same order, and what is sent
// over distance g is taken by a CTA that waits for nothing but smaller distances.
// Bound by the link, and by one CTA per peer and direction.
//   test  pytest tests/comm/test_trtllm_alltoall.py tests/comm/test_emulated_exchanges.py
//   bench  python benchmarks/bench_comm.py -k moe_comm
#pragma once
#include "fifo.h"
#include "wait.cuh"

namespace flashinfer {
namespace comm {

constexpr int FIFO_THREADS = 512;

struct Fifo {
  const FifoParams& p;
  const int me;

  __device__ __forceinline__ explicit Fifo(const FifoParams& params) : p(params), me(params.table.rank) {}

  /// Wait in one thread until a counter has come to `number`; return in all threads whether it has.
  __device__ __forceinline__ bool Wait(Meta which, int peer, uint32_t number, Stage stage) const {
    __shared__ bool has_come;
    if (threadIdx.x == 0) has_come = WaitForFlag(p.table, p.wait, which, peer, number, stage);
    __syncthreads();
    return has_come;
  }

  /// Copy rows between a slot, where they are dense, and a matrix, where `indices` tells their places.
  template <bool TO_SLOT>
  __device__ __forceinline__ void Copy(uint4* slot, uint4* rows, const int32_t* indices, int64_t count,
                                       int64_t most) const {
    const uint32_t words = uint32_t(p.row_bytes / 16), total = uint32_t(count) * words;
    for (uint32_t i = threadIdx.x; i < total; i += blockDim.x) {
      const uint32_t row = i / words;
      const int64_t place = indices[row];
      if (place < 0 || place >= most) continue;  // such a row does not exist
      uint4& outside = rows[place * words + (i - row * words)];
      if constexpr (TO_SLOT) {
        slot[i] = outside;
      } else {
        outside = slot[i];
      }
    }
  }

  __device__ __forceinline__ void Send(int peer) const {
    const FifoPart part(p.send_sums, peer, p.sends);
    uint32_t sent = *p.Counter(me, FIFO_SENT, peer);
    for (int64_t first = part.begin; first < part.end; first += p.RowsPerSlot(), ++sent) {
      if (!Wait(kCombineFlags, peer, sent - uint32_t(FIFO_DEPTH) + 1, kWaitCombine)) return;
      const int64_t count = min(p.RowsPerSlot(), part.end - first);
      Copy<true>(reinterpret_cast<uint4*>(p.Slot(peer, me, sent)), reinterpret_cast<uint4*>(const_cast<char*>(p.input)),
                 p.send_indices + first, count, p.input_rows);
      __threadfence_system();
      __syncthreads();
      if (threadIdx.x == 0) ptx::StoreReleaseSystem(p.Counter(peer, FIFO_FILLED, me), sent + 1);
    }
    if (threadIdx.x == 0) *p.Counter(me, FIFO_SENT, peer) = sent;
  }

  __device__ __forceinline__ void Take(int peer) const {
    const FifoPart part(p.recv_sums, peer, p.receives);
    uint32_t got = *p.Counter(me, FIFO_GOT, peer);
    for (int64_t first = part.begin; first < part.end; first += p.RowsPerSlot(), ++got) {
      if (!Wait(kDispatchFlags, peer, got + 1, kWaitDispatch)) return;
      const int64_t count = min(p.RowsPerSlot(), part.end - first);
      Copy<false>(reinterpret_cast<uint4*>(p.Slot(me, peer, got)), reinterpret_cast<uint4*>(p.output),
                  p.recv_indices + first, count, p.output_rows);
      __syncthreads();  // the slot is read
      if (threadIdx.x == 0) ptx::StoreReleaseSystem(p.Counter(peer, FIFO_TAKEN, me), got + 1);
    }
    if (threadIdx.x == 0) *p.Counter(me, FIFO_GOT, peer) = got;
  }

  /// The call of CTA `block` of `blocks`, an even number.
  __device__ __forceinline__ void Run(int block, int blocks) const {
    const int pairs = blocks / 2, world = p.table.world;
    const bool is_sender = block < pairs;
    for (int k = is_sender ? block : block - pairs; k < world; k += pairs) {
      if (is_sender) {
        Send((me + k) % world);
      } else {
        Take((me + world - k) % world);
      }
      __syncthreads();
    }
    ExchangeHead* const head = p.table.Head(me);
    if (threadIdx.x != 0 || ptx::AddOrdered(&head->arrived, 1) != blocks - 1) return;
    head->arrived = 0;
    head->call += 1;
  }
};

__global__ void __launch_bounds__(FIFO_THREADS) MoeCommKernel(const __grid_constant__ FifoParams p) {
  Fifo(p).Run(int(blockIdx.x), int(gridDim.x));
}

FLASHINFER_INLINE cudaError_t MoeComm(const FifoParams& p, cudaStream_t stream) {
  const int pairs = std::max(1, std::min(p.table.world, p.wait.max_blocks / 2));
  return Launch(MoeCommKernel, dim3(unsigned(2 * pairs)), dim3(FIFO_THREADS), false, stream, p);
}

}  // namespace comm
}  // namespace flashinfer
