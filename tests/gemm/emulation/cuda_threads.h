// SPDX-License-Identifier: Apache-2.0
// CUDA blocks on the CPU: each thread of a block is a fibre; barriers and warp instructions switch between them. The
// next fibre is chosen at random, so that a missing barrier shows as a wrong result. Blocks run one after another.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#undef __global__
#undef __launch_bounds__
#undef __grid_constant__
#undef __shared__
#undef __align__
#undef __device__
#undef __forceinline__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __device__
#define __forceinline__ inline

using std::max;
using std::min;

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};
inline Index3 threadIdx, blockIdx;
inline dim3 gridDim, blockDim;

namespace flashinfer {
namespace gemm {
extern unsigned char shared[];  // the name that the kernel gives to its dynamic shared memory
}
}  // namespace flashinfer

namespace emulation {

using flashinfer::gemm::shared;
constexpr int SHARED_BYTES = 99 * 1024;  // the least that a block of any device from SM80 on can have

/// A copy that has been started: 16 bytes, or zeros.
struct Copy {
  uint32_t to;
  const void* from;
  bool valid;
};

struct Fibre {
  ucontext_t context;
  std::vector<char> stack;
  bool done = false, waiting = false;
  std::vector<std::vector<Copy>> groups;  // committed copies, oldest first
  std::vector<Copy> open;                 // copies of the group that is not committed
};

/// Meeting point of threads. Each brings 16 words; all can read them until they meet again.
struct Meeting {
  int expected = 0, arrived = 0, phase = 0;
  std::vector<std::array<uint32_t, 16>> words[2];
};

inline std::vector<Fibre> fibres;
inline std::vector<Meeting> warps;
inline Meeting block;
inline ucontext_t scheduler;
inline int current = 0;
inline std::mt19937 random_order{7};
inline std::function<void()> body;

inline void Enter() {
  body();
  fibres[current].done = true;
  swapcontext(&fibres[current].context, &scheduler);
}

/// Wait until all expected threads are here; returns the words that they brought.
inline const std::vector<std::array<uint32_t, 16>>& Meet(Meeting& m, int first, int index,
                                                         const std::array<uint32_t, 16>& brought) {
  auto& words = m.words[m.phase];
  words[index] = brought;
  if (++m.arrived < m.expected) {
    fibres[current].waiting = true;
    swapcontext(&fibres[current].context, &scheduler);
  } else {
    m.arrived = 0;
    m.phase ^= 1;
    for (int i = 0; i < m.expected; ++i) fibres[first + i].waiting = false;
  }
  return words;
}

inline const std::vector<std::array<uint32_t, 16>>& MeetWarp(const std::array<uint32_t, 16>& brought) {
  const int thread = int(threadIdx.x), warp = thread / 32;
  return Meet(warps[warp], warp * 32, thread % 32, brought);
}

inline void RunBlock(int threads) {
  fibres = std::vector<Fibre>(threads);
  warps = std::vector<Meeting>(threads / 32);
  for (Meeting& m : warps) m.expected = 32, m.words[0].resize(32), m.words[1].resize(32);
  block = Meeting();
  block.expected = threads, block.words[0].resize(threads), block.words[1].resize(threads);
  std::memset(shared, 0xff, SHARED_BYTES);  // NaN: reads of what nobody has written show
  for (Fibre& fibre : fibres) {
    fibre.stack.resize(128 * 1024);
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.data();
    fibre.context.uc_stack.ss_size = fibre.stack.size();
    makecontext(&fibre.context, Enter, 0);
  }
  while (true) {
    std::vector<int> ready;
    bool alive = false;
    for (int i = 0; i < threads; ++i) {
      alive |= !fibres[i].done;
      if (!fibres[i].done && !fibres[i].waiting) ready.push_back(i);
    }
    if (!alive) return;
    if (ready.empty()) std::abort();  // threads wait for others that have left
    std::shuffle(ready.begin(), ready.end(), random_order);
    for (int i : ready) {
      current = i;
      threadIdx.x = unsigned(i);
      swapcontext(&scheduler, &fibres[i].context);
    }
  }
}

inline void RunGrid(dim3 grid, dim3 threads, const std::function<void()>& kernel) {
  gridDim = grid, blockDim = threads;
  body = kernel;
  for (unsigned i = 0; i < grid.x; ++i) {
    blockIdx.x = i;
    RunBlock(int(threads.x));
  }
}

}  // namespace emulation

inline void __syncthreads() { emulation::Meet(emulation::block, 0, int(threadIdx.x), {}); }
inline unsigned __ballot_sync(unsigned, bool x) {
  const auto& all = emulation::MeetWarp({x});
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= all[i][0] << i;
  return bits;
}
inline int __shfl_sync(unsigned, int x, int lane) { return int(emulation::MeetWarp({uint32_t(x)})[lane][0]); }
inline int __shfl_up_sync(unsigned, int x, int offset) {
  const int lane = threadIdx.x % 32;
  return int(emulation::MeetWarp({uint32_t(x)})[lane < offset ? lane : lane - offset][0]);
}
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline float __uint_as_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline int __float2int_rn(float x) { return int(__builtin_rintf(x)); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = uint64_t(y) << 32 | x;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(both >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  return out;
}
inline uint32_t __vcmpeq2(uint32_t x, uint32_t y) {
  const uint32_t differ = x ^ y;
  return ((differ & 0xffffu) == 0 ? 0xffffu : 0) | ((differ >> 16) == 0 ? 0xffff0000u : 0);
}
