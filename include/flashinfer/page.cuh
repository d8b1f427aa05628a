// SPDX-License-Identifier: Apache-2.0
// Appending to a paged KV cache on CUDA (layouts and parameters: page.h). Bound by DRAM: one read, one write per byte.
//
// A block of about 128 threads is (units of a row, heads, tokens), so no thread divides to find out what it copies; a
// unit is 16, 4, 2 or 1 bytes, whatever divides every address. Each thread moves one unit of the keys and the same one
// of the values: their loads are on the way while the three dependent loads of the look-up (row -> request -> page)
// take their turns. The lanes of a token look up the same page: a broadcast, no shared memory, no barrier.
//   test  pytest tests/page      bench  python benchmarks/bench_page.py
#pragma once
#include "page.h"
#include "page_table.cuh"
#include "ptx/pdl.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace page {

/// AppendPart with its row and its slot found; units of BYTES.
template <int BYTES>
struct Mover {
  using Bits = typename Word<BYTES>::type;
  const Bits* from;
  Bits* to;
  uint32_t units;

  __device__ __forceinline__ Mover(const AppendPart& p, uint32_t row, uint32_t head)
      : from(reinterpret_cast<const Bits*>(static_cast<const char*>(p.rows) + row * p.row_stride.token +
                                           head * p.row_stride.head)),
        to(reinterpret_cast<Bits*>(static_cast<char*>(p.cache) + head * p.cache_stride.head)),
        units(uint32_t(p.row_bytes) / BYTES) {}

  __device__ __forceinline__ Bits Load(uint32_t unit) const { return from[min(unit, units - 1)]; }
  __device__ __forceinline__ void Find(const AppendPart& p, DeviceSlot slot) {
    to = reinterpret_cast<Bits*>(reinterpret_cast<char*>(to) + slot.page * p.cache_stride.page +
                                 slot.entry * p.cache_stride.entry);
  }
  __device__ __forceinline__ void Store(uint32_t unit, Bits bits) const {
    if (unit < units) to[unit] = bits;
  }
};

struct AppendArgs {
  TableArgs table;
  AppendPart key, value;
  uint32_t num_rows, num_heads, units;
};

template <int BYTES>
__global__ void __launch_bounds__(THREADS) AppendKernel(const __grid_constant__ AppendArgs a) {
  ptx::GridDependencyWait();
  ptx::LaunchDependents();
  const uint32_t row = RowOfThread(), head = HeadOfThread();
  if (row >= a.num_rows || head >= a.num_heads) return;
  const int32_t batch = a.table.batch_indices[row], position = a.table.positions[row];
  Mover<BYTES> k(a.key, row, head), v(a.value, row, head);
  uint32_t unit = threadIdx.x;
  auto k_bits = k.Load(unit);
  auto v_bits = v.Load(unit);
  const DeviceSlot slot = SlotOf(a.table, batch, position);
  if (slot.page < 0) return;
  k.Find(a.key, slot);
  v.Find(a.value, slot);
  while (true) {
    k.Store(unit, k_bits);
    v.Store(unit, v_bits);
    unit += blockDim.x;
    if (unit >= a.units) break;  // rows of up to 2 KB end here
    k_bits = k.Load(unit);
    v_bits = v.Load(unit);
  }
}

/// Request of each row by binary search. Most batches fit into shared memory, where a step is faster than in L2.
constexpr int SHARED_REQUESTS = 1024;

template <bool SHARED>
__global__ void __launch_bounds__(THREADS) BatchIndicesKernel(const __grid_constant__ BatchIndicesParams p) {
  __shared__ int32_t copy[SHARED ? SHARED_REQUESTS + 1 : 1];
  const int32_t batch_size = int32_t(p.batch_size);
  if constexpr (SHARED) {
    for (int i = threadIdx.x; i <= batch_size; i += THREADS) copy[i] = p.append_indptr[i];
    __syncthreads();
  }
  const int32_t* indptr = SHARED ? copy : p.append_indptr;
  const int32_t row = blockIdx.x * THREADS + threadIdx.x;
  if (row >= p.num_rows) return;
  int32_t low = 0, high = batch_size + 1;  // the first entry above `row` is in [low, high]
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (indptr[middle] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const bool owned = low > 0 && low <= batch_size;
  p.batch_indices[row] = owned ? low - 1 : -1;
  p.positions[row] = owned ? row + p.seq_lens[low - 1] - indptr[low] : 0;
}

/// Bytes that divide every address of a part, as a mask of low bits.
inline uint64_t AddressBits(const AppendPart& p) {
  return reinterpret_cast<uintptr_t>(p.rows) | reinterpret_cast<uintptr_t>(p.cache) | p.row_stride.token |
         p.row_stride.head | p.cache_stride.page | p.cache_stride.entry | p.cache_stride.head | p.row_bytes;
}

template <int BYTES>
cudaError_t LaunchAppend(const AppendParams& p, cudaStream_t stream) {
  const int64_t units = std::max(p.key.row_bytes, p.value.row_bytes) / BYTES;
  const Shape shape(units, p.num_heads, p.table.num_rows);
  const AppendArgs args{MakeTable(p.table),    p.key,          p.value, uint32_t(p.table.num_rows),
                        uint32_t(p.num_heads), uint32_t(units)};
  return Launch(AppendKernel<BYTES>, shape.grid, shape.block, p.enable_pdl, stream, args);
}

}  // namespace page

FLASHINFER_INLINE Status AppendPaged(const AppendParams& p, Stream stream) {
  if (p.table.num_rows == 0 || p.num_heads == 0) return cudaSuccess;
  const uint64_t bits = page::AddressBits(p.key) | page::AddressBits(p.value);
  if (bits % 16 == 0) return page::LaunchAppend<16>(p, stream);
  if (bits % 4 == 0) return page::LaunchAppend<4>(p, stream);
  if (bits % 2 == 0) return page::LaunchAppend<2>(p, stream);
  return page::LaunchAppend<1>(p, stream);
}

FLASHINFER_INLINE Status BatchIndicesPositions(const BatchIndicesParams& p, Stream stream) {
  if (p.num_rows == 0) return cudaSuccess;
  auto kernel =
      p.batch_size <= page::SHARED_REQUESTS ? page::BatchIndicesKernel<true> : page::BatchIndicesKernel<false>;
  return Launch(kernel, dim3(CeilDiv(p.num_rows, page::THREADS)), dim3(page::THREADS), false, stream, p);
}

}  // namespace flashinfer
