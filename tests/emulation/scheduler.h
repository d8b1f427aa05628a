// SPDX-License-Identifier: Apache-2.0
// Blocks of a cluster on the CPU. Each thread is a fibre that runs until it waits; the next one is chosen at random.
// Asynchronous work of the hardware (copies, matrix products) is an event, which happens at a random time: early, or
// when no thread can go on. Clusters run one after another.
#pragma once
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "fibre.h"

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};
inline Index3 threadIdx, blockIdx;
inline dim3 gridDim, blockDim;

namespace emulation {

// 32-bit shared addresses are offsets in the block's memory. Those of another block have its rank + 1 in the top byte.
constexpr uint32_t SHARED_SPACE = 1 << 19;  // the static variables of all kernels of a library follow one another
constexpr uint32_t DYNAMIC_BASE = 1024;     // the system reserves 1 KB of each block on SM90
constexpr uint32_t MAX_DYNAMIC = 232448;    // limit of a block on SM90
constexpr uint32_t STATIC_BASE = DYNAMIC_BASE + MAX_DYNAMIC;
constexpr int RANK_SHIFT = 24;

struct Fibre;
struct Block;

/// Print like printf, to a string.
template <typename... Args>
std::string Format(const char* format, Args... args) {
  char text[512];
  std::snprintf(text, sizeof text, format, args...);
  return text;
}

/// Threads that wait for the same thing.
struct WaitList {
  std::vector<Fibre*> fibres;
  inline void Wake();
};

/// Threads of a warp that exchange words. All can read them until they meet again.
struct Meeting {
  unsigned mask = 0, arrived = 0;
  int phase = 0;
  std::array<std::array<uint32_t, 8>, 32> words[2];
  WaitList waiting;
};

struct NamedBarrier {
  int expected = 0, arrived = 0;  // expected 0: all threads of the block that have not left
  bool any = false;
  WaitList waiting;
};

struct Mbarrier {
  uint32_t count = 0;
  int64_t pending = 0, bytes = 0;
  uint32_t phase = 0;
  WaitList waiting;
};

/// A copy of cp.async that has been started, or zeros.
struct Copy {
  uint32_t to;
  const void* from;
  uint32_t bytes;
  bool valid;
};

/// A store of TMA: `read` takes it out of shared memory, `write` puts it into global memory.
struct BulkStore {
  std::function<void()> read, write;
  bool is_read = false, is_written = false;
  void Read() {
    if (!is_read) is_read = true, read();
  }
  void Write() {
    Read();
    if (!is_written) is_written = true, write();
  }
};

struct Accumulator;
/// Registers of a thread that a product will write.
struct InFlight {
  float* d;
  int count;
  uint64_t last;  // number of the last product that writes them
  std::shared_ptr<Accumulator> sum;
};

struct Fibre {
  Context context;
  Block* block = nullptr;
  int thread = 0;
  bool done = false;
  bool result = false;  // result of BarrierAny
  const char* waits_for = nullptr;
  uint32_t detail[2] = {0, 0};
  int polls = 0;  // tests of an mbarrier in a row that failed

  std::vector<Copy> copies;
  size_t copies_done = 0;
  std::vector<size_t> copy_groups;  // number of copies at the end of each group

  std::vector<std::shared_ptr<BulkStore>> open_stores;
  std::vector<std::vector<std::shared_ptr<BulkStore>>> store_groups;

  uint64_t products = 0;                 // wgmma instructions issued
  std::vector<uint64_t> product_groups;  // number of products at the end of each group
  std::vector<InFlight> in_flight;
  bool is_fenced = false;  // WgmmaFence since the last WgmmaWait

  bool cluster_arrived = false;
  uint64_t cluster_phase = 0;

  uint32_t proxy_epoch = 1;  // number of FenceAsyncProxy
};

struct Warpgroup;

struct Block {
  uint32_t rank = 0;
  Index3 index;
  unsigned char* memory = nullptr;
  std::vector<unsigned char> published;  // shared memory as wgmma and TMA may see it: at the last FenceAsyncProxy
  std::vector<Fibre> fibres;
  std::vector<std::map<unsigned, Meeting>> warps;
  std::vector<unsigned> left;        // lanes of each warp that have returned
  std::vector<uint64_t> slow_until;  // step before which a warp seldom runs
  NamedBarrier barriers[16];
  std::unordered_map<uint32_t, Mbarrier> mbarriers;
  std::vector<std::shared_ptr<Warpgroup>> warpgroups;
  std::vector<uint64_t> unfenced;  // per 16 bytes: thread and epoch of the last store that needs a proxy fence
  int alive = 0;
};

struct Event {
  bool late;  // happens when no thread can go on
  const char* name;
  std::function<void()> run;
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct State {
  Context scheduler;
  Fibre* current = nullptr;                    // null: an event
  std::vector<std::unique_ptr<Block>> blocks;  // blocks of the cluster
  std::vector<Fibre*> ready;
  std::vector<Event> events;
  std::function<void()> body;
  std::string failure;
  uint64_t random = 88172645463325252ull;
  int alive = 0;
  uint64_t steps = 0;
  uint32_t dynamic_bytes = 0;
  uint32_t static_bytes = 0;
  int cluster_arrived = 0;
  uint64_t cluster_phase = 0;
  WaitList cluster_waiting;
};
inline State state;

inline uint32_t Random(uint32_t below) {
  state.random ^= state.random << 13, state.random ^= state.random >> 7, state.random ^= state.random << 17;
  return uint32_t((state.random >> 16) % below);
}

/// End the launch with an error.
[[noreturn]] inline void Fail(const std::string& what) {
  if (state.current == nullptr) throw Failure(what);
  const Fibre& f = *state.current;
  state.failure = Format("block (%u, %u, %u) thread %d: %s", f.block->index.x, f.block->index.y, f.block->index.z,
                         f.thread, what.c_str());
  Context::Switch(state.current->context, state.scheduler);
  std::abort();
}
inline void Require(bool condition, const char* what) {
  if (!condition) Fail(what);
}

inline Block& ThisBlock() { return *state.current->block; }

inline void WaitList::Wake() {
  for (Fibre* f : fibres) state.ready.push_back(f);
  fibres.clear();
}

/// Let other threads run.
inline void Yield() {
  state.ready.push_back(state.current);
  Context::Switch(state.current->context, state.scheduler);
}
/// Let other threads run, sometimes: after what other threads may react to.
inline void MaybeYield() {
  if (state.current != nullptr && Random(4) == 0) Yield();
}

/// Wait until the list is woken. `what` and two numbers are for the report of a deadlock.
inline void Wait(WaitList& list, const char* what, uint32_t a = 0, uint32_t b = 0) {
  Fibre* const f = state.current;
  if (f == nullptr) throw Failure("an event waits");
  f->waits_for = what, f->detail[0] = a, f->detail[1] = b;
  list.fibres.push_back(f);
  Context::Switch(f->context, state.scheduler);
  f->waits_for = nullptr;
}

/// Let something happen at a random time.
inline void Later(const char* name, std::function<void()> run) {
  state.events.push_back({Random(2) == 0, name, std::move(run)});
}

/// Return the block and the offset of a shared address, as seen by `from`.
inline Block& BlockOf(Block& from, uint32_t address) {
  const uint32_t rank = address >> RANK_SHIFT;
  if (rank == 0) return from;
  if (rank > state.blocks.size()) Fail(Format("no block %u in the cluster", rank - 1));
  return *state.blocks[rank - 1];
}
inline uint32_t OffsetOf(uint32_t address) { return address & ((1u << RANK_SHIFT) - 1); }
inline uint32_t InCluster(uint32_t address, uint32_t rank) { return OffsetOf(address) | (rank + 1) << RANK_SHIFT; }

/// Return the memory of a shared address of a block, after a check of alignment and bounds.
inline unsigned char* Memory(Block& from, uint32_t address, uint32_t bytes, uint32_t alignment = 1) {
  const uint32_t at = OffsetOf(address);
  const bool is_dynamic = at >= DYNAMIC_BASE && at + bytes <= DYNAMIC_BASE + state.dynamic_bytes;
  const bool is_static = at >= STATIC_BASE && at + bytes <= STATIC_BASE + state.static_bytes;
  if (!is_dynamic && !is_static) {
    Fail(Format("%u bytes at shared address 0x%x are outside of the %u bytes from 0x%x", bytes, at, state.dynamic_bytes,
                DYNAMIC_BASE));
  }
  if (at % alignment != 0) Fail(Format("shared address 0x%x is not aligned to %u", at, alignment));
  return BlockOf(from, address).memory + at;
}
inline unsigned char* Memory(uint32_t address, uint32_t bytes, uint32_t alignment = 1) {
  return Memory(ThisBlock(), address, bytes, alignment);
}

/// Return the shared address of a pointer into this block's memory.
inline uint32_t AddressOf(const void* p) {
  const uintptr_t offset = reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(ThisBlock().memory);
  if (offset >= SHARED_SPACE) Fail("not a pointer to shared memory of this block");
  return uint32_t(offset);
}

/// The dynamic and the static variables that the copied headers declare with __shared__.
template <typename T>
T* DynamicShared(size_t alignment) {
  Require(DYNAMIC_BASE % alignment == 0, "alignment of dynamic shared memory");
  return reinterpret_cast<T*>(ThisBlock().memory + DYNAMIC_BASE);
}
template <typename T, size_t ALIGNMENT, typename Key>
T& StaticShared(Key) {
  static uint32_t offset = 0;
  if (offset == 0) {
    const uint32_t alignment = uint32_t(std::max(ALIGNMENT, alignof(T)));
    state.static_bytes = (state.static_bytes + alignment - 1) / alignment * alignment;
    offset = STATIC_BASE + state.static_bytes;
    state.static_bytes += uint32_t(sizeof(T));
    if (offset + sizeof(T) > SHARED_SPACE) Fail("too many static shared variables");
  }
  return *reinterpret_cast<T*>(ThisBlock().memory + offset);
}

}  // namespace emulation
