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

/// Slot number of each row: page * page_size + entry. Rows whose slot is outside of the cache are skipped.
struct SlotMapping {
  const void* slots;
  bool is_int64;
  int64_t num_slots;  ///< slots of the cache, num_pages * page_size
  int64_t page_size;
};

/// Keys or values. Each stride is in elements of its own tensor.
template <typename T>
struct Nvfp4Part {
  const T* rows;
  uint8_t* codes;
  uint8_t* scales;  ///< e4m3
  TokenStride row_stride;
  SlotStride codes_stride, scales_stride;
  const float* global_on_device;  ///< global scale in device memory, checked by the kernel; null: use `global`
  float global;
};

template <typename T>
struct Nvfp4AppendParams {
  PageTable table;      ///< with a mapping, only num_rows is used
  SlotMapping mapping;  ///< slots null: the page table gives the slot of each row
  int64_t num_heads, head_dim;
  Nvfp4Part<T> key, value;
};

template <typename T>
Status Nvfp4AppendPaged(const Nvfp4AppendParams<T>& params, Stream stream);

}  // namespace flashinfer
