// SPDX-License-Identifier: Apache-2.0
// Bounds of packed sequences, from the sequence number of each token; and logical chunks counted by sequence.
//   test  pytest tests/recurrent -k ssd      bench  python benchmarks/bench_recurrent_mamba.py -k ssd
#pragma once
#include <algorithm>

#include "../../utils.cuh"
#include "../../warp.cuh"
#include "../ssd.h"

namespace flashinfer {
namespace recurrent {

__global__ void SsdBoundsKernel(IndexArray seq_idx, int32_t* bounds, int tokens, int sequences) {
  for (int64_t t = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; t < tokens; t += int64_t(gridDim.x) * blockDim.x) {
    const int64_t n = seq_idx.At(0, t);
    if (n < 0 || n >= sequences) continue;
    if (t == 0 || seq_idx.At(0, t - 1) != n) bounds[2 * n] = int32_t(t);
    if (t + 1 == tokens || seq_idx.At(0, t + 1) != n) bounds[2 * n + 1] = int32_t(t + 1);
  }
}

/// One block: counts by atomics of the block's shared pass would limit the sequences, so they go to global memory.
__global__ void SeqChunkCumsumKernel(IndexArray seq_idx, IndexArray chunk_indices, IndexArray chunk_offsets,
                                     int32_t* output, int chunk, int chunks, int tokens, int sequences) {
  __shared__ int32_t carry, warp_sums[32];
  for (int n = threadIdx.x; n <= sequences; n += blockDim.x) output[n] = 0;
  if (threadIdx.x == 0) carry = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < chunks; i += blockDim.x) {
    const int64_t token = chunk_indices.At(i) * chunk + chunk_offsets.At(i);
    const int64_t n = token >= 0 && token < tokens ? seq_idx.At(0, token) : -1;
    if (n >= 0 && n < sequences) atomicAdd(&output[n + 1], 1);
  }
  __threadfence_block();
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int first = 1; first <= sequences; first += blockDim.x) {
    const int n = first + threadIdx.x;
    const int32_t count = n <= sequences ? *const_cast<volatile int32_t*>(&output[n]) : 0;
    const int32_t inside = WarpInclusiveScan(count);
    if (lane == 31) warp_sums[warp] = inside;
    __syncthreads();
    int32_t before = carry;
    for (int w = 0; w < warp; ++w) before += warp_sums[w];
    if (n <= sequences) output[n] = before + inside;
    __syncthreads();
    if (threadIdx.x == blockDim.x - 1) carry = before + inside;
    __syncthreads();
  }
}

FLASHINFER_INLINE Status SsdBounds(const IndexArray& seq_idx, int32_t* bounds, int tokens, int sequences,
                                   Stream stream) {
  const cudaError_t status = cudaMemsetAsync(bounds, 0, size_t(sequences) * 2 * sizeof(int32_t), stream);
  if (status != cudaSuccess || tokens == 0) return status;
  const dim3 grid(std::min<int64_t>(CeilDiv(tokens, 256), 1024));
  return Launch(SsdBoundsKernel, grid, dim3(256), false, stream, seq_idx, bounds, tokens, sequences);
}

FLASHINFER_INLINE Status SeqChunkCumsum(const IndexArray& seq_idx, const IndexArray& chunk_indices,
                                        const IndexArray& chunk_offsets, int32_t* output, int chunk, int chunks,
                                        int tokens, int sequences, Stream stream) {
  return Launch(SeqChunkCumsumKernel, dim3(1), dim3(1024), false, stream, seq_idx, chunk_indices, chunk_offsets, output,
                chunk, chunks, tokens, sequences);
}

}  // namespace recurrent
}  // namespace flashinfer
