// SPDX-License-Identifier: Apache-2.0
// Appending to a paged KV cache on CUDA (layouts and parameters: page.h). Bound by DRAM: one read, one write per byte.
//
// A block of about 128 threads is (units of a row, heads, tokens), so no thread divides to find out what it copies; a
// unit is 16, 4, 2 or 1 bytes, whatever divides every address, and heads that follow each other are one row. Each
// thread moves one unit of the keys and the same one of the values: their loads are on the way while the three
// dependent loads of the look-up (row -> request -> page) take their turns. In small batches each thread looks its
// token up, a broadcast without a barrier. In large ones a thread has four, one thread looks a token up for all, and
// rows are brought into L2 before their turn.
//
// Measured on an H200 (16384 tokens of 8 x 128 in bf16, L2 full of dirty lines): 37.4 us; two tokens per thread, which
// each looks up, 38.2. A plain copy takes 36.3 us, one to pages in random order without any look-up 37.8. The prefetch
// takes 65536 tokens from 137.8 us to 135.7, at any distance from 1 to 4 MB; at 8 MB it costs 3 us. Hints to the caches
// gain nothing; loads after the look-up lose 1.5 us, bulk copies of whole tokens 1 to 4.
//   test  pytest tests/page      bench  python benchmarks/bench_page.py
#pragma once
#include "page.h"
#include "page_table.cuh"
#include "ptx/pdl.cuh"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace page {

/// AppendPart in the form that the kernel reads: units of BYTES, 32-bit strides.
template <int BYTES>
struct Part {
  using Bits = typename Word<BYTES>::type;
  const Bits* rows;
  Bits* cache;
  uint32_t token, head, page, entry, slot_head;  // strides
  uint32_t units;                                // units per row

  __device__ __forceinline__ const Bits* From(uint32_t row_index, uint32_t head_index) const {
    return rows + (uint64_t{row_index} * token + uint64_t{head_index} * head);
  }
  __device__ __forceinline__ Bits* To(DeviceSlot slot, uint32_t head_index) const {
    return cache + (uint64_t{uint32_t(slot.page)} * page + uint64_t{uint32_t(slot.entry)} * entry +
                    uint64_t{head_index} * slot_head);
  }
};

template <int BYTES>
struct AppendArgs {
  TableArgs table;
  Part<BYTES> key, value;
  uint32_t num_rows, num_heads, units;
  uint32_t ahead;  // prefetch distance in rows; 0 for no prefetch
};

/// Kernel for small batches: one unit of a row per thread, or several units if rows are long.
template <int BYTES>
__global__ void __launch_bounds__(THREADS) AppendKernel(const __grid_constant__ AppendArgs<BYTES> a) {
  using Bits = typename Word<BYTES>::type;
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const uint32_t row = min(RowOfThread(), a.num_rows - 1), head = HeadOfThread();  // past the end: the last row again
  const int32_t batch = a.table.batch_indices[row], position = a.table.positions[row];
  PrefetchTable(a.table);
  if (head >= a.num_heads) return;
  const bool has_key = threadIdx.x < a.key.units, has_value = threadIdx.x < a.value.units;
  const Bits *from_key = a.key.From(row, head), *from_value = a.value.From(row, head);
  Bits k, v;
  if (has_key) k = from_key[threadIdx.x];
  if (has_value) v = from_value[threadIdx.x];
  const DeviceSlot slot = SlotOf(a.table, batch, position);
  if (slot.page < 0) return;
  Bits *to_key = a.key.To(slot, head), *to_value = a.value.To(slot, head);
  if (has_key) to_key[threadIdx.x] = k;
  if (has_value) to_value[threadIdx.x] = v;
#pragma unroll 1
  for (uint32_t unit = threadIdx.x + blockDim.x; unit < a.units; unit += blockDim.x) {  // rows of more than 2 KB
    if (unit < a.key.units) to_key[unit] = from_key[unit];
    if (unit < a.value.units) to_value[unit] = from_value[unit];
  }
}

/// Consecutive tokens per thread in large batches. One thread looks up the slot of a token for all threads.
constexpr int TOKENS_PER_THREAD = 4;

template <int BYTES>
__global__ void __launch_bounds__(THREADS) AppendManyKernel(const __grid_constant__ AppendArgs<BYTES> a) {
  using Bits = typename Word<BYTES>::type;
  __shared__ DeviceSlot slots[THREADS];
  ptx::GridDependencyWait();
  ptx::LaunchDependentsOfFew();
  const uint32_t thread = ThreadOfBlock(), in_block = blockDim.z * TOKENS_PER_THREAD, block_row = blockIdx.x * in_block;
  const uint32_t first = threadIdx.z * TOKENS_PER_THREAD, head = HeadOfThread();
  // Past the end, the last row is copied again.
  auto row_of = [&](uint32_t i) { return min(block_row + i, a.num_rows - 1); };
  int32_t batch = -1, position = 0;
  if (thread < in_block) {
    batch = a.table.batch_indices[row_of(thread)];
    position = a.table.positions[row_of(thread)];
  }
  PrefetchTable(a.table);
  const bool has_key = head < a.num_heads && threadIdx.x < a.key.units;
  const bool has_value = head < a.num_heads && threadIdx.x < a.value.units;
  Bits k[TOKENS_PER_THREAD], v[TOKENS_PER_THREAD];
#pragma unroll
  for (int t = 0; t < TOKENS_PER_THREAD; ++t) {
    if (has_key) k[t] = a.key.From(row_of(first + t), head)[threadIdx.x];
    if (has_value) v[t] = a.value.From(row_of(first + t), head)[threadIdx.x];
  }
  const uint32_t later = block_row + a.ahead;
  if (thread == 0 && a.ahead != 0 && later + in_block <= a.num_rows) {
    ptx::PrefetchL2(a.key.From(later, 0), in_block * a.key.token * BYTES);
    ptx::PrefetchL2(a.value.From(later, 0), in_block * a.value.token * BYTES);
  }
  if (thread < in_block) slots[thread] = SlotOf(a.table, batch, position);
  __syncthreads();
#pragma unroll
  for (int t = 0; t < TOKENS_PER_THREAD; ++t) {
    const DeviceSlot slot = slots[first + t];
    if (slot.page < 0) continue;
    if (has_key) a.key.To(slot, head)[threadIdx.x] = k[t];
    if (has_value) a.value.To(slot, head)[threadIdx.x] = v[t];
  }
}

/// Largest batch whose offsets are searched in shared memory. The request of each row is found by binary search; a step
/// in shared memory is faster than in L2, and most batches fit.
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

/// Return the bitwise OR of all addresses and strides of a part; its low zero bits give the common alignment.
inline uint64_t AddressBits(const AppendPart& p) {
  return reinterpret_cast<uintptr_t>(p.rows) | reinterpret_cast<uintptr_t>(p.cache) | p.row_stride.token |
         p.row_stride.head | p.cache_stride.page | p.cache_stride.entry | p.cache_stride.head | p.row_bytes;
}

/// Merge heads that are contiguous, both in the rows and in the cache, into one head.
inline AppendParams FoldHeads(AppendParams p) {
  auto folds = [](const AppendPart& part) {
    return part.row_stride.head == part.row_bytes && part.cache_stride.head == part.row_bytes;
  };
  if (p.num_heads > 1 && folds(p.key) && folds(p.value)) {
    p.key.row_bytes *= p.num_heads;
    p.value.row_bytes *= p.num_heads;
    p.num_heads = 1;
  }
  return p;
}

/// Convert to 32-bit units. Returns false if a stride or a row exceeds 32 bits.
template <int BYTES>
bool MakePart(const AppendPart& p, Part<BYTES>& out) {
  const auto [token, head] = p.row_stride;
  const auto [page, entry, slot_head] = p.cache_stride;
  if (std::max({token, head, page, entry, slot_head, p.row_bytes}) / BYTES > UINT32_MAX) return false;
  out.rows = static_cast<const typename Word<BYTES>::type*>(p.rows);
  out.cache = static_cast<typename Word<BYTES>::type*>(p.cache);
  out.token = uint32_t(token / BYTES);
  out.head = uint32_t(head / BYTES);
  out.page = uint32_t(page / BYTES);
  out.entry = uint32_t(entry / BYTES);
  out.slot_head = uint32_t(slot_head / BYTES);
  out.units = uint32_t(p.row_bytes / BYTES);
  return true;
}

/// Return the prefetch distance in rows: 4 MB. No prefetch if the heads of a row are not contiguous or take several
/// blocks, nor in batches of less than 32 MB, whose loads are all in flight at once: 4096 tokens would take 3 % longer.
template <int BYTES>
uint32_t RowsAhead(const AppendArgs<BYTES>& a) {
  auto dense = [&](const Part<BYTES>& part) {
    return part.token == a.num_heads * part.units && (a.num_heads == 1 || part.head == part.units);
  };
  const int64_t row_bytes = (int64_t{a.key.token} + a.value.token) * BYTES;
  const bool is_large = a.num_rows * row_bytes >= 32 << 20, one_block = uint64_t{a.num_heads} * a.units <= THREADS;
  return is_large && one_block && dense(a.key) && dense(a.value) ? uint32_t(CeilDiv(4 << 20, row_bytes)) : 0;
}

template <int BYTES>
cudaError_t LaunchAppend(const AppendParams& p, cudaStream_t stream) {
  constexpr int64_t MANY = 4096;  // tokens from which there is bandwidth to fill
  AppendArgs<BYTES> a{MakeTable(p.table)};
  if (!MakePart(p.key, a.key) || !MakePart(p.value, a.value)) return cudaErrorInvalidValue;
  a.num_rows = uint32_t(p.table.num_rows);
  a.num_heads = uint32_t(p.num_heads);
  a.units = std::max(a.key.units, a.value.units);
  a.ahead = RowsAhead(a);
  const bool many = BYTES == 16 && a.units >= TOKENS_PER_THREAD && a.units <= THREADS && p.table.num_rows >= MANY;
  const Shape shape(a.units, p.num_heads, CeilDiv(p.table.num_rows, many ? TOKENS_PER_THREAD : 1));
  auto launch = [&](auto kernel) { return Launch(kernel, shape.grid, shape.block, p.enable_pdl, stream, a); };
  if constexpr (BYTES == 16) {
    if (many) return launch(AppendManyKernel<BYTES>);
  }
  return launch(AppendKernel<BYTES>);
}

}  // namespace page

FLASHINFER_INLINE Status AppendPaged(const AppendParams& params, Stream stream) {
  if (params.table.num_rows == 0 || params.num_heads == 0) return cudaSuccess;
  const AppendParams p = page::FoldHeads(params);
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
