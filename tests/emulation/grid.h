// SPDX-License-Identifier: Apache-2.0
// Launches: the clusters of a grid, one after another.
#pragma once
#include "tma.h"

namespace emulation {

inline void Enter() {
  Fibre& f = *state.current;
  state.body();
  if (!f.in_flight.empty()) Fail("a thread returns before its wgmma products are finished");
  for (const auto& group : f.store_groups) {
    for (const auto& store : group)
      Require(store->is_read, "a thread returns before its TMA stores have read shared memory");
  }
  Require(f.open_stores.empty(), "a thread returns with TMA stores that are in no group");
  Leave(f);
  Context::Switch(f.context, state.scheduler);
  std::abort();
}

inline void Resume(Fibre& f) {
  state.current = &f;
  const unsigned thread = unsigned(f.thread);
  threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
  blockIdx = f.block->index;
  Context::Switch(state.scheduler, f.context);
  state.current = nullptr;
  if (!state.failure.empty()) throw Failure(state.failure);
}

/// Say what each group of threads waits for.
inline std::string DescribeWaits() {
  std::string text = "deadlock: no thread can go on\n";
  for (auto& block : state.blocks) {
    const int threads = int(block->fibres.size());
    const auto key = [&](int i) {
      const Fibre& f = block->fibres[i];
      if (f.done) return std::string("returned");
      std::string what = Format("waits for %s", f.waits_for);
      const std::string kind = f.waits_for;
      if (kind.find("mbarrier") == 0) {
        const Mbarrier& b = block->mbarriers[f.detail[0]];
        what = Format("waits for mbarrier 0x%x (dynamic + %d), parity %u: %d of %u arrivals and %d bytes are missing",
                      f.detail[0], int(f.detail[0]) - int(DYNAMIC_BASE), f.detail[1], int(b.pending), b.count,
                      int(b.bytes));
      } else if (kind.find("named") == 0) {
        const NamedBarrier& b = block->barriers[f.detail[0]];
        what = Format("waits for named barrier %u: %d threads of %d are there", f.detail[0], b.arrived,
                      b.expected == 0 ? block->alive : b.expected);
      } else if (kind.find("wgmma") == 0) {
        what = Format("waits for wgmma product %u, which not all threads of the warpgroup have issued", f.detail[0]);
      } else if (kind.find("other lanes") == 0) {
        what = Format("waits for other lanes of its warp, mask 0x%x", f.detail[0]);
      }
      return what;
    };
    std::map<std::string, std::string> groups;  // threads by what they wait for
    for (int i = 0; i < threads;) {
      int end = i + 1;
      const std::string what = key(i);
      while (end < threads && key(end) == what) ++end;
      groups[what] += end == i + 1 ? Format(" %d", i) : Format(" %d-%d", i, end - 1);
      i = end;
    }
    for (const auto& group : groups) {
      text += Format("  block (%u, %u, %u) threads", block->index.x, block->index.y, block->index.z);
      text += group.second + ": " + group.first + "\n";
    }
  }
  return text;
}

inline void FireEvent(bool force) {
  const size_t i = Random(uint32_t(state.events.size()));
  if (!force && state.events[i].late) return;
  Event event = std::move(state.events[i]);
  state.events[i] = std::move(state.events.back());
  state.events.pop_back();
  event.run();
}

/// Choose a thread that can run. Now and then some warps become slow, so that others run far ahead.
inline Fibre* TakeReady() {
  if (state.steps++ % 512 == 0) {
    for (auto& block : state.blocks) {
      for (uint64_t& until : block->slow_until) until = state.steps + (Random(3) == 0 ? Random(2048) : 0);
    }
  }
  size_t i = 0;
  for (int tries = 0; tries < 8; ++tries) {
    i = Random(uint32_t(state.ready.size()));
    if (state.ready[i]->block->slow_until[state.ready[i]->thread / 32] <= state.steps) break;
  }
  Fibre* const f = state.ready[i];
  state.ready[i] = state.ready.back();
  state.ready.pop_back();
  return f;
}

inline void RunCluster(const std::vector<Index3>& indices, int threads) {
  static std::vector<unsigned char*> memories;
  state.blocks.clear(), state.ready.clear(), state.events.clear();
  state.cluster_arrived = 0, state.cluster_phase = 0, state.cluster_waiting.fibres.clear();
  state.alive = threads * int(indices.size());
  while (memories.size() < indices.size()) {
    memories.push_back(static_cast<unsigned char*>(std::aligned_alloc(SHARED_SPACE, SHARED_SPACE)));
  }
  for (size_t rank = 0; rank < indices.size(); ++rank) {
    state.blocks.push_back(std::make_unique<Block>());
    Block& block = *state.blocks.back();
    block.rank = uint32_t(rank), block.index = indices[rank], block.alive = threads;
    block.memory = memories[rank];
    std::memset(block.memory, 0xff, SHARED_SPACE);  // NaN: reads of what nobody has written show
    block.published.assign(SHARED_SPACE, 0xff);
    block.fibres = std::vector<Fibre>(threads);
    block.warps.resize((threads + 31) / 32), block.left.resize((threads + 31) / 32);
    block.slow_until.resize((threads + 31) / 32);
    block.unfenced.resize(SHARED_SPACE / 16);
    for (int i = 0; i < threads / 128; ++i) block.warpgroups.push_back(std::make_shared<Warpgroup>());
    for (int i = 0; i < threads; ++i) {
      Fibre& f = block.fibres[i];
      f.block = &block, f.thread = i;
      f.context.Start(StackOf(int(rank) * threads + i), STACK_BYTES, Enter);
      state.ready.push_back(&f);
    }
  }
  while (state.alive > 0) {
    if (!state.events.empty() && (state.ready.empty() || Random(16) == 0)) {
      FireEvent(state.ready.empty() || Random(256) == 0);  // those that can run may wait in a loop for what is late
      continue;
    }
    if (state.ready.empty()) throw Failure(DescribeWaits());
    Resume(*TakeReady());
  }
  while (!state.events.empty()) {
    const std::string name = state.events.back().name;
    if (name == "TMA load" || name == "bulk load") throw Failure("a block leaves before a " + name + " has landed");
    FireEvent(true);
  }
}

/// Run a grid. Returns false after a failure, whose text LastError() has.
inline std::string& LastError() {
  static std::string text;
  return text;
}
inline bool RunGrid(dim3 grid, dim3 threads, dim3 cluster, size_t dynamic_bytes, std::function<void()> body) {
  gridDim = grid, blockDim = threads;
  state.body = std::move(body);
  state.failure.clear();
  state.dynamic_bytes = uint32_t(dynamic_bytes);
  try {
    if (grid.x % cluster.x != 0 || grid.y % cluster.y != 0 || grid.z % cluster.z != 0)
      throw Failure("grid % cluster != 0");
    for (unsigned z = 0; z < grid.z; z += cluster.z) {
      for (unsigned y = 0; y < grid.y; y += cluster.y) {
        for (unsigned x = 0; x < grid.x; x += cluster.x) {
          std::vector<Index3> blocks;
          for (unsigned k = 0; k < cluster.z; ++k) {
            for (unsigned j = 0; j < cluster.y; ++j) {
              for (unsigned i = 0; i < cluster.x; ++i) blocks.push_back({x + i, y + j, z + k});
            }
          }
          RunCluster(blocks, int(threads.x * threads.y * threads.z));
        }
      }
    }
  } catch (const Failure& failure) {
    LastError() = failure.what();
    return false;
  }
  return true;
}

}  // namespace emulation
