// SPDX-License-Identifier: Apache-2.0
// Chunked gated delta rule on SM90, split form: the chain over the parts of a request (split.cuh).
//   test  pytest tests/recurrent/test_emulated_gdn_prefill.py      bench  python benchmarks/bench_gdn_prefill.py
#pragma once
#include "../../device/occupancy.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/pdl.cuh"
#include "passes.h"
#include "split.cuh"

namespace flashinfer {
namespace recurrent {
namespace sm90 {

constexpr int START_ROWS = 8, START_THREADS = 128;  // rows of a state that a block follows over the parts
constexpr int START_OWN = 4;                        // rows and columns of a thread, and rows of a warp

/// Shared memory of StartStatesKernel: M of this part and of the next.
struct StartShared {
  alignas(16) float transfer[2][DIM * DIM];
  alignas(16) float state[START_ROWS][DIM], partial[START_ROWS][DIM];
};

/// Compute the states at the start of the parts of a request: S <- S M + N in fp32. Two warps have four rows and the first
/// half of the sum each, two others the second half. What bounds it is M, 64 KB for each part and block.
template <typename T>
__global__ void __launch_bounds__(START_THREADS) StartStatesKernel(const __grid_constant__ DeltaParams<T> p) {
  extern __shared__ __align__(1024) char dynamic[];
  auto& shared = *reinterpret_cast<StartShared*>(dynamic);
  constexpr int BLOCKS = DIM / START_ROWS;
  const int part = blockIdx.x % BLOCKS, rest = blockIdx.x / BLOCKS, head = rest % p.num_heads,
            number = rest / p.num_heads;
  const int warp = threadIdx.x / 32, first = warp % 2 * START_OWN, half = warp / 2;
  const int column = threadIdx.x % 32 * START_OWN, row = part * START_ROWS + first;
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const Request request = p.RequestOf(number);
  const int64_t slot = FirstChunkSlot(number, request.begin, p.segment), own = p.slots[number];
  const States m = StatesOf(p, PartState::kTransfer), n = StatesOf(p, PartState::kAdded);
  const States starts = StatesOf(p, PartState::kStart);
  const int64_t parts = (request.length - 1) / p.segment;  // all but the last
  if (request.length == 0 || parts == 0) return;
  const auto copy = [&](int64_t j) {
    const float* const from = static_cast<const float*>(m.data) + (slot + j) * m.slot + head * m.head;
    const uint32_t to = ptx::SharedAddress(shared.transfer[j % 2]);
    for (int i = threadIdx.x; i < DIM * DIM / 4; i += START_THREADS) ptx::CopyAsync16(to + i * 16, from + i * 4, true);
  };
  copy(0);
  ptx::CopyCommit();
  if (half == 0) {
#pragma unroll
    for (int i = 0; i < START_OWN * START_OWN; ++i) {
      const int r = i / START_OWN, c = column + i % START_OWN;
      float x = 0.f;
      if (p.initial.data != nullptr) {
        const int64_t at = own * p.initial.slot + head * p.initial.head + (row + r) * p.initial.v + c * p.initial.k;
        WithStateType(p.initial.type,
                      [&](auto zero) { x = float(static_cast<const decltype(zero)*>(p.initial.data)[at]); });
      }
      shared.state[first + r][c] = x;
    }
  }
  for (int64_t j = 0; j < parts; ++j) {
    const int64_t at = (slot + j) * m.slot + head * m.head + row * DIM + column;
    float sums[START_OWN][START_OWN] = {};
    if (j + 1 < parts) copy(j + 1);
    ptx::CopyCommit();
    if (half == 0) {
#pragma unroll
      for (int r = 0; r < START_OWN; ++r) {
        *reinterpret_cast<float4*>(sums[r]) =
            *reinterpret_cast<const float4*>(static_cast<const float*>(n.data) + at + r * DIM);
      }
    }
    ptx::CopyWait<1>();
    __syncthreads();
    const float* const transfer = shared.transfer[j % 2];
#pragma unroll 2
    for (int k = half * (DIM / 2); k < (half + 1) * (DIM / 2); k += 4) {
      float4 s[START_OWN];
#pragma unroll
      for (int r = 0; r < START_OWN; ++r) s[r] = *reinterpret_cast<const float4*>(&shared.state[first + r][k]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(transfer + (k + i) * DIM + column);
#pragma unroll
        for (int r = 0; r < START_OWN; ++r) {
          const float y = i == 0 ? s[r].x : i == 1 ? s[r].y : i == 2 ? s[r].z : s[r].w;
          sums[r][0] = fmaf(y, x.x, sums[r][0]), sums[r][1] = fmaf(y, x.y, sums[r][1]);
          sums[r][2] = fmaf(y, x.z, sums[r][2]), sums[r][3] = fmaf(y, x.w, sums[r][3]);
        }
      }
    }
    if (half == 1) {
#pragma unroll
      for (int r = 0; r < START_OWN; ++r) {
        *reinterpret_cast<float4*>(&shared.partial[first + r][column]) = *reinterpret_cast<const float4*>(sums[r]);
      }
    }
    __syncthreads();
    if (half == 0) {
      float* const to = static_cast<float*>(starts.data) + at + starts.slot;
#pragma unroll
      for (int r = 0; r < START_OWN; ++r) {
        const float4 x = *reinterpret_cast<const float4*>(&shared.partial[first + r][column]);
        const float4 sum{sums[r][0] + x.x, sums[r][1] + x.y, sums[r][2] + x.z, sums[r][3] + x.w};
        *reinterpret_cast<float4*>(to + r * DIM) = sum;
        *reinterpret_cast<float4*>(&shared.state[first + r][column]) = sum;
      }
    }
  }
}

template <typename T>
cudaError_t LaunchStartStates(const DeltaParams<T>& p, cudaStream_t stream) {
  constexpr auto KERNEL = StartStatesKernel<T>;
  constexpr int BYTES = sizeof(StartShared);
  const cudaError_t allowed = device::AllowShared<KERNEL, BYTES>();
  if (allowed != cudaSuccess) return allowed;
  const dim3 grid(unsigned(p.requests) * p.num_heads * (DIM / START_ROWS));
  return LaunchShared(KERNEL, grid, dim3(START_THREADS), BYTES, p.enable_pdl, stream, p);
}

}  // namespace sm90
}  // namespace recurrent
}  // namespace flashinfer
