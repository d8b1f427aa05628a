// SPDX-License-Identifier: Apache-2.0
// All-reduce that reads the inputs of the peers where they lie (vLLM's operators): every rank shows its input in memory
// that all map, and adds those of all ranks in fp32, in rank order, rounded once.
//   one-shot  enter -> sum of all inputs -> leave                     each rank reads everything
//   two-shot  enter -> sum of the own share into scratch -> leave -> copy of all shares
// `enter` and `leave` are flags with the number of the call, one per peer: they count calls, so ranks may have other
// grids. A peer overwrites its input behind the leave flags of all, and scratch behind the next enter flags of all.
#pragma once
#include "../../backend.h"
#include "../../host_device.h"
#include "../peer_table.h"

namespace flashinfer {
namespace comm {

/// Head of the shared memory of a rank; scratch lies behind it. Zero bytes are its first state.
struct PullHead {
  uint32_t call;     ///< calls that are done
  int32_t arrived;   ///< CTAs whose sums are done
  int32_t left;      ///< CTAs that are done
  uint32_t aborted;  ///< written by a peer that gave up: 1 + the rank it waited for
  uint32_t enter[MAX_RANKS], leave[MAX_RANKS];
  uint64_t requests[2];  ///< CPU: elements and type of this rank's call, by its parity; ranks that differ raise
};
constexpr int64_t PULL_HEAD_BYTES = 512;
static_assert(sizeof(PullHead) <= PULL_HEAD_BYTES, "the head must fit in front of the scratch");

template <typename T>
struct PullParams {
  PeerTable peers;
  const int64_t*
      inputs;  ///< address of the input of each rank, in device memory: a graph may be captured before it is known
  T* out;
  int64_t size;  ///< elements, whole 16 bytes
  bool is_two_shot;
  int32_t blocks;
  int32_t stage;        ///< CPU: 0 begin, 1 go on waiting for `enter`, 2 for `leave`
  int64_t wait_us;      ///< CPU: return after this time, to be resumed
  uint64_t timeout_ns;  ///< CUDA, 0: wait forever
  uint32_t* record;     ///< CUDA: host memory, what the watchdog found

  FLASHINFER_HD PullHead* Head(int r) const { return reinterpret_cast<PullHead*>(peers.memory[r]); }
};

/// Entry of the CUDA kernel (kernel.cuh). That of the CPU is PullOnHost (cpu.h).
template <typename T>
Status Pull(const PullParams<T>& p, Stream stream);

}  // namespace comm
}  // namespace flashinfer
