// SPDX-License-Identifier: Apache-2.0
// Helpers of the kernels that append to a paged cache: the slot of a row, and the row and head of each thread.
#pragma once
#include <cassert>

#include "page.h"
#include "ptx/prefetch.cuh"
#include "utils.cuh"

namespace flashinfer {
namespace page {

constexpr int THREADS = 128;

/// PageTable in the form that kernels read: 32-bit sizes.
struct TableArgs {
  const int32_t *batch_indices, *positions, *kv_indices, *kv_indptr;
  int32_t batch_size, num_indices, num_pages;
  FastDivisor page_size;
};

inline TableArgs MakeTable(const PageTable& t) {
  auto clamp = [](int64_t n) { return int32_t(std::min<int64_t>(n, INT32_MAX)); };
  return {t.batch_indices,     t.positions,          t.kv_indices,       t.kv_indptr,
          clamp(t.batch_size), clamp(t.num_indices), clamp(t.num_pages), FastDivisor(uint32_t(t.page_size))};
}

__device__ __forceinline__ uint32_t ThreadOfBlock() {
  return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
}

/// Prefetch the beginning of the table (all of it in a small batch) into L2, by the first block, while the loads of
/// requests and positions of rows are in flight: four tokens take 4.6 us instead of 4.9 on an H200.
__device__ __forceinline__ void PrefetchTable(const TableArgs& t) {
  constexpr int LINE = 32;  // indices
  const int32_t at = ThreadOfBlock() * LINE;
  if (blockIdx.x != 0 || blockIdx.y != 0) return;
  if (at <= t.batch_size) ptx::PrefetchL2(t.kv_indptr + at);
  if (at < t.num_indices) ptx::PrefetchL2(t.kv_indices + at);
}

struct DeviceSlot {
  int32_t page;  // -1: the row has no slot
  int32_t entry;
};

/// Return the slot of a row, given its request and position. A row without a slot is skipped, or traps in a debug
/// build.
__device__ __forceinline__ DeviceSlot SlotOf(const TableArgs& t, int32_t batch, int32_t position) {
  constexpr DeviceSlot NONE{-1, 0};
  if (batch < 0) return NONE;
  bool found = batch < t.batch_size && position >= 0;
  assert(found && "batch_indices or positions out of range");
  if (!found) return NONE;
  const int32_t begin = t.kv_indptr[batch], end = min(t.kv_indptr[batch + 1], t.num_indices);
  const int32_t index = t.page_size.Divide(position);
  found = begin >= 0 && index < end - begin;
  assert(found && "position beyond the pages of its request");
  if (!found) return NONE;
  const int32_t page = t.kv_indices[begin + index];
  found = uint32_t(page) < uint32_t(t.num_pages);
  assert(found && "kv_indices names a page outside of the cache");
  return found ? DeviceSlot{page, position - index * int32_t(t.page_size.divisor)} : NONE;
}

/// Launch shape for `rows` rows of `heads` heads of `units` units: whole tokens per block if a block has enough
/// threads.
struct Shape {
  dim3 grid, block;
  Shape(int64_t units, int64_t heads, int64_t rows) {
    const int64_t x = std::min<int64_t>(units, THREADS);
    const int64_t head_blocks = CeilDiv(heads, THREADS / x);
    const int64_t y = CeilDiv(heads, head_blocks);
    const int64_t z = std::min<int64_t>({THREADS / (x * y), 64, rows});
    block = dim3(x, y, z);
    grid = dim3(CeilDiv(rows, z), head_blocks);
  }
};

__device__ __forceinline__ uint32_t RowOfThread() { return blockIdx.x * blockDim.z + threadIdx.z; }
__device__ __forceinline__ uint32_t HeadOfThread() { return blockIdx.y * blockDim.y + threadIdx.y; }

}  // namespace page
}  // namespace flashinfer
