// SPDX-License-Identifier: Apache-2.0
// The one-shot all-reduce on the CPU, called by test_emulated_allreduce.py: ranks are CTAs of one cluster.
#include <flashinfer/comm/allreduce/one_shot.cuh>

using namespace flashinfer;
using namespace flashinfer::comm;

namespace {

constexpr int MOST = 4;

template <typename T>
struct Group {
  AllReduceParams<T> ranks[MOST];
  int world, blocks[MOST];
};

/// The CTAs of rank 0 are the first, those of rank 1 follow; ranks may have other numbers of them.
template <typename T, bool IS_FP4>
__global__ void GroupKernel(const __grid_constant__ Group<T> group) {
  __shared__ float scratch[64];
  int rank = 0, block = int(blockIdx.x);
  while (block >= group.blocks[rank]) block -= group.blocks[rank++];
  OneShot<T, false, IS_FP4>(group.ranks[rank]).Run(block, group.blocks[rank], scratch);
}

template <typename T>
int Run(const int64_t* numbers) {
  const int64_t* next = numbers;
  Group<T> group{};
  group.world = int(*next++);
  const int present = int(*next++);
  int total = 0;
  for (int rank = 0; rank < group.world; ++rank) total += group.blocks[rank] = int(*next++);
  AllReduceParams<T> p{};
  p.slot_bytes = *next++;
  p.tokens = *next++;
  p.hidden = *next++;
  p.timeout_ns = uint64_t(*next++);
  p.eps = 1e-5f;
  p.weight_bias = 1.f;
  p.scale_value = 0.5f;
  p.fp4_grid = {p.tokens, p.hidden / FP4_BLOCK, ScaleLayout(*next++)};
  p.peers.world = group.world;
  for (int rank = 0; rank < group.world; ++rank) p.peers.memory[rank] = reinterpret_cast<char*>(*next++);
  for (int rank = 0; rank < group.world; ++rank) {
    AllReduceParams<T>& own = group.ranks[rank];
    own = p;
    own.peers.rank = rank;
    own.input = reinterpret_cast<const T*>(*next++);
    own.output = reinterpret_cast<T*>(*next++);
    own.residual_in = reinterpret_cast<const T*>(*next++);
    own.residual_out = reinterpret_cast<T*>(*next++);
    own.gamma = reinterpret_cast<const T*>(*next++);
    own.norm_out = reinterpret_cast<T*>(*next++);
    own.quant_out = reinterpret_cast<float8_e4m3_t*>(*next++);
    own.scale_out = reinterpret_cast<float*>(*next++);
    own.record = reinterpret_cast<uint32_t*>(*next++);
    own.fp4_out = reinterpret_cast<uint8_t*>(*next++);
    own.fp4_scales = reinterpret_cast<uint8_t*>(*next++);
  }
  if (present < group.world) {  // only the first rank comes
    group.ranks[0].max_blocks = 1;
    return int(AllReduce<T>(group.ranks[0], nullptr));
  }
  const unsigned grid = unsigned(total), threads = unsigned(OneShotThreads(p.hidden, OneShot<T>::VEC));
  LaunchConfig launch(dim3(grid), dim3(threads), 0, false, nullptr, int(grid));
  if constexpr (sizeof(T) == 2) {
    if (group.ranks[0].fp4_out != nullptr) return int(launch.Launch(GroupKernel<T, true>, group));
  }
  return int(launch.Launch(GroupKernel<T, false>, group));
}

}  // namespace

EMULATION_EXPORT int all_reduce(int64_t type, const int64_t* numbers) {
  return type == 0 ? Run<float>(numbers) : Run<__nv_bfloat16>(numbers);
}
