// SPDX-License-Identifier: Apache-2.0
// K-major decode (k_major.h): a block takes 32 columns of one head, a warp a quarter of the key channels, a lane four
// columns of every fourth of these. Bound by the bytes of the states.
//   test  pytest tests/recurrent/test_gdn_decode.py      bench  python benchmarks/bench_recurrent.py
#pragma once
#include "../ptx/pdl.cuh"
#include "../utils.cuh"
#include "k_major.h"
#include "step/stage.cuh"

namespace flashinfer {
namespace recurrent {
namespace step {

constexpr int K_MAJOR_TILE = 32;  // columns of a block: rows of 128 bytes

template <typename T, int K>
__global__ void __launch_bounds__(THREADS, K > 128 ? 3 : 4) KMajorStepKernel(const __grid_constant__ StepParams p) {
  using TokenShape = Shape<K, 1, Form::kMany>;
  constexpr int ROWS = K / WARPS / GROUPS;
  using F4 = Vec<float, 4>;
  __shared__ Shared<GatedDeltaRule, TokenShape> shared;
  __shared__ float sums[2][WARPS][K_MAJOR_TILE];
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();

  Place at{};
  at.n = int64_t(blockIdx.z) * gridDim.y + blockIdx.y;
  if (at.n >= p.sequences) return;
  at.range = Range{at.n, 0, 1, 1};
  const int tiles = int(p.value_dim) / K_MAJOR_TILE;
  at.head = blockIdx.x / tiles;
  at.key_head = p.key_group.Divide(at.head);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % COLUMNS * 4;
  const int first = blockIdx.x % tiles * K_MAJOR_TILE, row = warp * (K / WARPS) + lane / COLUMNS;
  float* state = static_cast<float*>(p.initial.data) + p.initial.Offset(at.n, 0, at.head, row) + first + column;

  F4 s[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) s[r] = LoadSome<float, 4>(state + r * GROUPS * p.initial.row, p.is_vectorised);
  const T* values = static_cast<const T*>(p.v) + p.v_stride.Offset(at.n, 0, at.head) + first;
  float v[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = ToFloat(values[column + j]);
  if (warp == 0) StageToken<GatedDeltaRule, T, float>(p, at, 0, 0, shared);
  __syncthreads();

  const float decay = shared.decay[0][0];
  float sk[4] = {}, sq[4] = {};
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float k = shared.k[0][row + r * GROUPS], q = shared.q[0][row + r * GROUPS];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      s[r][j] *= decay;
      sk[j] += s[r][j] * k;
      sq[j] += s[r][j] * q;
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int offset = COLUMNS; offset < 32; offset *= 2) {
      sk[j] += __shfl_xor_sync(ALL_LANES, sk[j], offset);
      sq[j] += __shfl_xor_sync(ALL_LANES, sq[j], offset);
    }
    if (lane < COLUMNS) sums[0][warp][column + j] = sk[j], sums[1][warp][column + j] = sq[j];
  }
  __syncthreads();
  float u[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float state_k = 0.f, state_q = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) state_k += sums[0][w][column + j], state_q += sums[1][w][column + j];
    u[j] = GatedDeltaRule::Correction(v[j], state_k, shared.beta[0]);
    if (warp == 0 && lane < COLUMNS) {
      const int64_t to = p.out_stride.Offset(at.n, 0, at.head) + first + column + j;
      StoreNumber(p.out, to, p.out_type, state_q + u[j] * shared.kq[0]);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float k = shared.k[0][row + r * GROUPS];
#pragma unroll
    for (int j = 0; j < 4; ++j) s[r][j] += u[j] * k;
    StoreSome(state + r * GROUPS * p.initial.row, s[r], p.is_vectorised);
  }
}

template <typename T, int K>
Status LaunchKMajor(const StepParams& p, Stream stream) {
  constexpr int64_t MAX_GRID_Y = 65535;
  const int64_t deep = CeilDiv(p.sequences, MAX_GRID_Y);
  const dim3 grid(unsigned(p.value_dim / K_MAJOR_TILE * p.value_heads), unsigned(CeilDiv(p.sequences, deep)),
                  unsigned(deep));
  return Launch(KMajorStepKernel<T, K>, grid, dim3(THREADS), p.enable_pdl, stream, p);
}

}  // namespace step

template <typename T>
Status KMajorStep(const StepParams& p, Stream stream) {
  if (p.sequences == 0 || p.value_heads == 0 || p.value_dim == 0) return cudaSuccess;
  if (p.key_dim == 64) return step::LaunchKMajor<T, 64>(p, stream);
  if (p.key_dim == 128) return step::LaunchKMajor<T, 128>(p, stream);
  if (p.key_dim == 256) return step::LaunchKMajor<T, 256>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace recurrent
}  // namespace flashinfer
