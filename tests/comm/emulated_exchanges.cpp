// SPDX-License-Identifier: Apache-2.0
// The two-sided exchange, the reading all-reduce and the comparison of calls on the CPU, called by
// test_emulated_exchanges.py: ranks are CTAs of one cluster; CTA b is CTA b / world of rank b % world.
#include <flashinfer/comm/allreduce/check.cuh>
#include <flashinfer/comm/alltoall/fifo.cuh>
#include <flashinfer/comm/pull/kernel.cuh>

using namespace flashinfer;
using namespace flashinfer::comm;

namespace {

constexpr int MOST = 4;

template <typename Params>
struct Group {
  Params ranks[MOST];
  int world;
};

template <typename Params, typename Body>
__global__ void GroupKernel(const __grid_constant__ Group<Params> group) {
  const int rank = blockIdx.x % group.world;
  Body(group.ranks[rank]).Run(int(blockIdx.x) / group.world, int(gridDim.x) / group.world);
}

template <typename Params, typename Body>
int Launch(const Group<Params>& group, int present, int blocks) {
  Group<Params> here = group;
  here.world = present;
  const unsigned grid = unsigned(present * blocks);
  return int(LaunchConfig(dim3(grid), dim3(64), 0, false, nullptr, int(grid)).Launch(GroupKernel<Params, Body>, here));
}

struct Compare {
  const CheckParams& p;
  __device__ explicit Compare(const CheckParams& params) : p(params) {}
  __device__ void Run(int, int) const {
    if (threadIdx.x < 32) CompareCalls(p);
  }
};

}  // namespace

/// numbers: world, present ranks, blocks, table, stride, row bytes, input rows, output rows, time-out; for each rank input,
/// output, send sums, send indices, their number, recv sums, recv indices, their number, record.
EMULATION_EXPORT int fifo(const int64_t* n) {
  Group<FifoParams> group{};
  FifoParams p{};
  p.table.world = group.world = int(n[0]);
  const int present = int(n[1]), blocks = int(n[2]);
  p.table.memory = reinterpret_cast<char*>(n[3]);
  p.table.stride = n[4];
  p.table.active = ~uint64_t{0};
  p.table.meta[kDispatchFlags] = FIFO_FILLED;
  p.table.meta[kCombineFlags] = FIFO_TAKEN;
  p.row_bytes = n[5];
  p.input_rows = n[6];
  p.output_rows = n[7];
  p.wait.timeout_ns = uint64_t(n[8]);
  n += 9;
  for (int rank = 0; rank < group.world; ++rank, n += 9) {
    FifoParams& own = group.ranks[rank];
    own = p;
    own.table.rank = rank;
    own.input = reinterpret_cast<const char*>(n[0]);
    own.output = reinterpret_cast<char*>(n[1]);
    own.send_sums = reinterpret_cast<const int32_t*>(n[2]);
    own.send_indices = reinterpret_cast<const int32_t*>(n[3]);
    own.sends = n[4];
    own.recv_sums = reinterpret_cast<const int32_t*>(n[5]);
    own.recv_indices = reinterpret_cast<const int32_t*>(n[6]);
    own.receives = n[7];
    own.wait.record = reinterpret_cast<uint32_t*>(n[8]);
  }
  return Launch<FifoParams, Fifo>(group, present, blocks);
}

/// numbers: world, present ranks, blocks, size, two-shot, time-out, table of inputs; for each rank memory, output, record.
EMULATION_EXPORT int pull(const int64_t* n) {
  using Params = PullParams<__nv_bfloat16>;
  Group<Params> group{};
  Params p{};
  p.peers.world = group.world = int(n[0]);
  const int present = int(n[1]), blocks = int(n[2]);
  p.size = n[3];
  p.is_two_shot = n[4] != 0;
  p.timeout_ns = uint64_t(n[5]);
  p.inputs = reinterpret_cast<const int64_t*>(n[6]);
  n += 7;
  for (int rank = 0; rank < group.world; ++rank) p.peers.memory[rank] = reinterpret_cast<char*>(n[3 * rank]);
  for (int rank = 0; rank < group.world; ++rank, n += 3) {
    group.ranks[rank] = p;
    group.ranks[rank].peers.rank = rank;
    group.ranks[rank].out = reinterpret_cast<__nv_bfloat16*>(n[1]);
    group.ranks[rank].record = reinterpret_cast<uint32_t*>(n[2]);
  }
  return Launch<Params, PullKernelBody<__nv_bfloat16>>(group, present, blocks);
}

/// numbers: world, present ranks, time-out; for each rank memory, digest, record.
EMULATION_EXPORT int check(const int64_t* n) {
  Group<CheckParams> group{};
  group.world = int(n[0]);
  for (int rank = 0; rank < group.world; ++rank) {
    CheckParams& p = group.ranks[rank];
    p.peers.world = group.world;
    p.peers.rank = rank;
    for (int peer = 0; peer < group.world; ++peer) p.peers.memory[peer] = reinterpret_cast<char*>(n[3 + 3 * peer]);
    p.digest = uint32_t(n[4 + 3 * rank]);
    p.record = reinterpret_cast<uint32_t*>(n[5 + 3 * rank]);
    p.timeout_ns = uint64_t(n[2]);
  }
  return Launch<CheckParams, Compare>(group, int(n[1]), 1);
}
