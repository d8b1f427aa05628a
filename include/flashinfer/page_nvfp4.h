// SPDX-License-Identifier: Apache-2.0
// Appending to a paged KV cache in NVFP4: parameters and entry, shared by both backends.
// Every 16 elements of a head share one scale; g is the global scale of the keys (or values):
//   sf    = e4m3(max|x| / (6 g))                 to nearest even, at most 448
//   code  = e2m1(x / (sf g))                     to nearest even, at most 6; all zero where sf is
// Two codes per byte, the low nibble first. Defined in page_nvfp4.cuh (CUDA) and page_nvfp4_cpu.h (CPU).
//   test  pytest tests/page/test_page_nvfp4.py      bench  python benchmarks/bench_page_nvfp4.py
#pragma once
#include "page.h"

namespace flashinfer {

constexpr int NVFP4_BLOCK = 16;

/// Slots given one by one: page * page_size + entry; others than those of the cache are skipped.
struct SlotMapping {
  const void* slots;
  bool is_int64;
  int64_t num_slots;  ///< slots of the cache, num_pages * page_size
  int64_t page_size;
};

/// Keys or values. Strides are in elements of what they belong to.
template <typename T>
struct Nvfp4Part {
  const T* rows;
  uint8_t* codes;
  uint8_t* scales;  ///< e4m3
  TokenStride row_stride;
  SlotStride codes_stride, scales_stride;
  const float* global_on_device;  ///< read and checked by the kernel; null: `global` is the scale
  float global;
};

template <typename T>
struct Nvfp4AppendParams {
  PageTable table;      ///< num_rows is that of the call; the rest is unused with a mapping
  SlotMapping mapping;  ///< slots null: the table says where rows go
  int64_t num_heads, head_dim;
  Nvfp4Part<T> key, value;
};

template <typename T>
Status Nvfp4AppendPaged(const Nvfp4AppendParams<T>& params, Stream stream);

}  // namespace flashinfer
