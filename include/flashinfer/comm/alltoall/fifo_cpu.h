// SPDX-License-Identifier: Apache-2.0
// Exchange of rows through first-in-first-out buffers, CPU tensors over shared memory; layout and counters in fifo.h.
// One thread of a rank serves all peers in turn and never waits for one while another could go on.
//   test  pytest tests/comm/test_trtllm_alltoall.py
#pragma once
#include "fifo.h"
#include "one_sided_cpu.h"

namespace flashinfer {
namespace comm {

/// Send what fits in the buffer of a peer; return whether anything moved.
inline bool SendSlots(const FifoParams& p, int peer) {
  const int me = p.table.rank;
  const FifoPart part(p.send_sums, peer, p.sends);
  int64_t& done = p.progress[peer];
  uint32_t* const sent = p.Counter(me, FIFO_SENT, peer);
  bool moved = false;
  while (part.begin + done < part.end && *sent - LoadFlag(p.Counter(me, FIFO_TAKEN, peer)) < uint32_t(FIFO_DEPTH)) {
    char* const slot = p.Slot(peer, me, *sent);
    const int64_t first = part.begin + done, count = std::min(p.RowsPerSlot(), part.end - first);
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(slot + i * p.row_bytes, p.input + p.send_indices[first + i] * p.row_bytes, p.row_bytes);
    }
    StoreFlag(p.Counter(peer, FIFO_FILLED, me), ++*sent);
    done += count;
    moved = true;
  }
  return moved;
}

/// Take what a peer has sent; return whether anything moved.
inline bool TakeSlots(const FifoParams& p, int peer) {
  const int me = p.table.rank;
  const FifoPart part(p.recv_sums, peer, p.receives);
  int64_t& done = p.progress[p.table.world + peer];
  uint32_t* const got = p.Counter(me, FIFO_GOT, peer);
  bool moved = false;
  while (part.begin + done < part.end && LoadFlag(p.Counter(me, FIFO_FILLED, peer)) != *got) {
    const char* const slot = p.Slot(me, peer, *got);
    const int64_t first = part.begin + done, count = std::min(p.RowsPerSlot(), part.end - first);
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(p.output + p.recv_indices[first + i] * p.row_bytes, slot + i * p.row_bytes, p.row_bytes);
    }
    StoreFlag(p.Counter(peer, FIFO_TAKEN, me), ++*got);
    done += count;
    moved = true;
  }
  return moved;
}

inline int64_t MoeCommOnHost(const FifoParams& p) {
  const ExchangeTable& t = p.table;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(p.wait.wait_us);
  for (uint32_t polls = 1;; ++polls) {
    bool moved = false;
    int64_t waiting = EXCHANGE_DONE;
    for (int k = 0; k < t.world; ++k) {
      const int to = (t.rank + k) % t.world, from = (t.rank + t.world - k) % t.world;
      moved |= SendSlots(p, to);
      moved |= TakeSlots(p, from);
      const FifoPart sends(p.send_sums, to, p.sends), receives(p.recv_sums, from, p.receives);
      if (sends.begin + p.progress[to] < sends.end) waiting = to;
      if (receives.begin + p.progress[t.world + from] < receives.end) waiting = from;
    }
    if (waiting == EXCHANGE_DONE) {
      t.Head(t.rank)->call += 1;
      return EXCHANGE_DONE;
    }
    if (moved) continue;
    const uint32_t late = LoadFlag(&t.Head(t.rank)->aborted);
    if (late != 0) return EXCHANGE_GAVE_UP + late - 1;
    if (polls % 64 == 0 && std::chrono::steady_clock::now() > deadline) return waiting;
    sched_yield();
  }
}

}  // namespace comm
}  // namespace flashinfer
