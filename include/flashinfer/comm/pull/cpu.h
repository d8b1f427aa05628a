// SPDX-License-Identifier: Apache-2.0
// All-reduce that reads the inputs of the peers, CPU tensors over shared memory; protocol in params.h.
//   test  pytest tests/comm/test_vllm_ar.py
#pragma once
#include <sched.h>

#include <chrono>

#include "../../cpu/parallel.h"
#include "../../cpu/vec.h"
#include "params.h"

namespace flashinfer {
namespace comm {

/// Outcome of a call: done; 64 * stage + rank, still waiting for that rank in that stage (0 enter, 1 leave); or that a
/// peer gave up waiting for a rank, or that a rank sums something else.
constexpr int64_t PULL_DONE = -1, PULL_STAGE = 64, PULL_GAVE_UP = 128, PULL_DIFFER = 256;

inline int64_t MeetPeers(const PeerTable& peers, uint32_t (PullHead::*flags)[MAX_RANKS], uint32_t call,
                         int64_t wait_us) {
  PullHead* const own = reinterpret_cast<PullHead*>(peers.memory[peers.rank]);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(wait_us);
  for (int r = 0; r < peers.world; ++r) {
    for (uint32_t polls = 1; int32_t(__atomic_load_n(&(own->*flags)[r], __ATOMIC_ACQUIRE) - call) < 0; ++polls) {
      if (polls % 64 != 0) continue;
      const uint32_t late = __atomic_load_n(&own->aborted, __ATOMIC_RELAXED);
      if (late != 0) return PULL_GAVE_UP + late - 1;
      if (std::chrono::steady_clock::now() > deadline) return r;
      sched_yield();  // there may be fewer cores than ranks
    }
  }
  return PULL_DONE;
}

template <typename T>
int64_t PullOnHost(const PullParams<T>& p) {
  const PeerTable& peers = p.peers;
  const uint32_t call = p.Head(peers.rank)->call + 1;
  const auto tell = [&](uint32_t (PullHead::*flags)[MAX_RANKS]) {
    for (int r = 0; r < peers.world; ++r) {
      __atomic_store_n(&(p.Head(r)->*flags)[peers.rank], call, __ATOMIC_RELEASE);
    }
  };
  const uint64_t request = uint64_t(p.size) * 3 + (std::is_same_v<T, float> ? 0 : std::is_same_v<T, float16_t> ? 1 : 2);
  if (p.stage == 0) {
    p.Head(peers.rank)->requests[call % 2] = request;
    tell(&PullHead::enter);
  }
  if (p.stage < 2) {
    const int64_t waiting = MeetPeers(peers, &PullHead::enter, call, p.wait_us);
    if (waiting != PULL_DONE) return waiting;
    for (int r = 0; r < peers.world; ++r) {
      if (p.Head(r)->requests[call % 2] == request) continue;
      p.Head(peers.rank)->call = call;
      return PULL_DIFFER + r;
    }
    cpu::ParallelFor(p.size / cpu::LANES + 1, cpu::LANES * peers.world, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * cpu::LANES, last = std::min(p.size, end * cpu::LANES);
      if (first >= last) return;
      cpu::ForEachVec(last - first, [&](int64_t i, auto lanes) {
        cpu::Vec sum{};
        for (int r = 0; r < peers.world; ++r) {
          sum += cpu::Load(reinterpret_cast<const T*>(p.inputs[r]) + first + i, lanes);
        }
        cpu::Store(p.out + first + i, sum, lanes);
      });
    });
    tell(&PullHead::leave);
  }
  const int64_t waiting = MeetPeers(peers, &PullHead::leave, call, p.wait_us);
  if (waiting != PULL_DONE) return waiting < PULL_STAGE ? waiting + PULL_STAGE : waiting;
  p.Head(peers.rank)->call = call;
  return PULL_DONE;
}

}  // namespace comm
}  // namespace flashinfer
