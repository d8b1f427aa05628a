// SPDX-License-Identifier: Apache-2.0
// Warps, named barriers, mbarriers and the barrier of a cluster.
#pragma once
#include "scheduler.h"

namespace emulation {

using Words = std::array<uint32_t, 8>;

inline bool CompleteMeeting(Block& block, int warp, Meeting& m) {
  if (m.arrived == 0 || (m.mask & ~block.left[warp] & ~m.arrived) != 0) return false;
  m.arrived = 0;
  m.phase ^= 1;
  m.waiting.Wake();
  return true;
}

/// Wait until the lanes of `mask` are here; returns the words that they brought.
inline const std::array<Words, 32>& MeetWarp(const Words& brought, unsigned mask = 0xffffffffu) {
  Block& block = ThisBlock();
  const int thread = state.current->thread, warp = thread / 32, lane = thread % 32;
  if ((mask >> lane & 1) == 0) Fail("a lane is not in the mask of its warp instruction");
  Meeting& m = block.warps[warp][mask];
  m.mask = mask;
  auto& words = m.words[m.phase];
  words[lane] = brought;
  m.arrived |= 1u << lane;
  // Nobody is present that is missing: the last one completes it.
  if (!CompleteMeeting(block, warp, m)) Wait(m.waiting, "other lanes of its warp, mask", mask);
  return words;
}

inline void CompleteNamed(Block& block, NamedBarrier& b) {
  if (b.arrived == 0 || b.arrived < (b.expected == 0 ? block.alive : b.expected)) return;
  for (Fibre* f : b.waiting.fibres) f->result = b.any;
  b.arrived = 0, b.any = false;
  b.waiting.Wake();
}

/// Arrive at a named barrier and, with `wait`, wait for the others. Returns true if any thread passed true.
inline bool Named(int id, int threads, bool wait, bool value = false) {
  if (id < 0 || id > 15) Fail(Format("barrier %d: there are 16", id));
  if (threads % 32 != 0 || threads < 0) Fail(Format("barrier %d of %d threads: not whole warps", id, threads));
  Fibre* const f = state.current;
  NamedBarrier& b = f->block->barriers[id];
  if (b.arrived != 0 && b.expected != threads) {
    Fail(Format("barrier %d of %d threads: others arrived with %d", id, threads, b.expected));
  }
  b.expected = threads;
  b.any |= value;
  ++b.arrived;
  if (threads != 0 && b.arrived > threads) Fail(Format("barrier %d: more than %d threads arrived", id, threads));
  if (wait) b.waiting.fibres.push_back(f);
  CompleteNamed(*f->block, b);
  if (!wait) return MaybeYield(), false;
  f->waits_for = "named barrier, threads", f->detail[0] = uint32_t(id), f->detail[1] = uint32_t(threads);
  Context::Switch(f->context, state.scheduler);
  f->waits_for = nullptr;
  return f->result;
}

/// The 8 bytes of an mbarrier in shared memory: what overwrites them is found.
inline uint64_t MbarrierMark(uint32_t offset) { return 0x6d62617272696572ull + offset; }

inline void InitMbarrier(uint32_t address, uint32_t arrivals) {
  const uint64_t mark = MbarrierMark(OffsetOf(address));
  std::memcpy(Memory(address, 8, 8), &mark, 8);
  Mbarrier& b = ThisBlock().mbarriers[OffsetOf(address)];
  if (!b.waiting.fibres.empty()) Fail("an mbarrier is initialised while threads wait for it");
  if (arrivals == 0 || arrivals >= 1u << 20) Fail(Format("an mbarrier of %u arrivals", arrivals));
  b.count = arrivals, b.pending = arrivals, b.bytes = 0, b.phase = 0;
}

inline Mbarrier& MbarrierAt(Block& from, uint32_t address) {
  uint64_t mark;
  std::memcpy(&mark, Memory(from, address, 8, 8), 8);
  Block& block = BlockOf(from, address);
  const auto found = block.mbarriers.find(OffsetOf(address));
  if (found == block.mbarriers.end()) Fail(Format("mbarrier 0x%x is not initialised", OffsetOf(address)));
  if (mark != MbarrierMark(OffsetOf(address))) Fail(Format("mbarrier 0x%x is overwritten", OffsetOf(address)));
  if (block.alive == 0) Fail(Format("mbarrier 0x%x is signalled after its block has left", OffsetOf(address)));
  return found->second;
}

/// Count arrivals and expected (positive) or landed (negative) bytes.
inline void UpdateMbarrier(Block& from, uint32_t address, int arrivals, int64_t bytes) {
  Mbarrier& b = MbarrierAt(from, address);
  b.pending -= arrivals;
  b.bytes += bytes;
  if (b.pending < 0) Fail(Format("mbarrier 0x%x: more than %u arrivals in a phase", OffsetOf(address), b.count));
  if (b.bytes >= 1 << 20 || b.bytes <= -(1 << 20)) Fail(Format("mbarrier 0x%x: too many bytes", OffsetOf(address)));
  if (b.pending != 0 || b.bytes != 0) return;
  b.phase ^= 1;
  b.pending = b.count;
  b.waiting.Wake();
}
inline void Arrive(uint32_t address, int64_t expect_bytes = 0) {
  // The bytes first: the phase must not end between the two.
  UpdateMbarrier(ThisBlock(), address, 1, expect_bytes);
  MaybeYield();
}
/// Report bytes that have landed, from an event of block `from`.
inline void CompleteBytes(Block& from, uint32_t address, uint32_t bytes) {
  UpdateMbarrier(from, address, 0, -int64_t(bytes));
}

inline bool PhaseEnded(uint32_t address, uint32_t parity) {
  if (parity > 1) Fail(Format("parity %u", parity));
  return MbarrierAt(ThisBlock(), address).phase != parity;
}
inline void WaitMbarrier(uint32_t address, uint32_t parity) {
  while (!PhaseEnded(address, parity)) {
    Wait(MbarrierAt(ThisBlock(), address).waiting, "mbarrier, parity", OffsetOf(address), parity);
  }
}
/// Test once, sometimes twice without success, then wait: a loop of tests must not keep others from running.
inline bool TestMbarrier(uint32_t address, uint32_t parity) {
  Fibre& f = *state.current;
  if (!PhaseEnded(address, parity) && f.polls++ == 0 && Random(2) == 0) return Yield(), PhaseEnded(address, parity);
  f.polls = 0;
  WaitMbarrier(address, parity);
  return true;
}

inline void CompleteCluster() {
  if (state.cluster_arrived < state.alive || state.cluster_arrived == 0) return;
  state.cluster_arrived = 0;
  ++state.cluster_phase;
  for (auto& block : state.blocks) {
    for (Fibre& f : block->fibres) f.cluster_arrived = false;
  }
  state.cluster_waiting.Wake();
}
inline void ArriveCluster() {
  Fibre& f = *state.current;
  if (f.cluster_arrived) Fail("a thread arrives twice at the cluster barrier without a wait");
  f.cluster_arrived = true;
  f.cluster_phase = state.cluster_phase;
  ++state.cluster_arrived;
  CompleteCluster();
  MaybeYield();
}
inline void WaitCluster() {
  const uint64_t phase = state.current->cluster_phase;
  while (state.cluster_phase <= phase) Wait(state.cluster_waiting, "cluster barrier");
}

/// Called when a thread has returned: those that wait for all threads do not wait for it.
inline void Leave(Fibre& f) {
  f.done = true;
  f.block->left[f.thread / 32] |= 1u << f.thread % 32;
  --f.block->alive, --state.alive;
  if (f.cluster_arrived) --state.cluster_arrived;
  for (auto& m : f.block->warps[f.thread / 32]) CompleteMeeting(*f.block, f.thread / 32, m.second);
  for (NamedBarrier& b : f.block->barriers) {
    if (b.expected == 0) CompleteNamed(*f.block, b);
  }
  CompleteCluster();
}

}  // namespace emulation
