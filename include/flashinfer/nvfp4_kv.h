// SPDX-License-Identifier: Apache-2.0
// NVFP4 to 16 bits: parameters and entries, shared by both backends.
//   y = e2m1 * scale * global     in fp32 from left to right (the first product is exact), rounded once
// Two codes to a byte, the even element in the low nibble; one e4m3 scale for 16 elements of a row.
// Defined in nvfp4_kv.cuh (CUDA) and nvfp4_kv_cpu.h (CPU).
//   test  pytest tests/quantization/test_nvfp4_kv.py      bench  python benchmarks/bench_quantization.py -k nvfp4
#pragma once
#include "backend.h"

namespace flashinfer {

/// Dequantisation of a contiguous matrix.
template <typename T>
struct Nvfp4DequantizeParams {
  const uint8_t* data;    ///< size / 2
  const uint8_t* scales;  ///< size / 16, e4m3
  const float* global_scale;
  T* out;
  int64_t size;  ///< elements, a multiple of 16
};

template <typename T>
Status Nvfp4Dequantize(const Nvfp4DequantizeParams<T>& params, Stream stream);

/// Offset of a head of one token in a paged cache, in elements: page * p + token_of_page * t + head * h.
struct PageStride {
  int64_t page;
  int64_t token;
  int64_t head;
};

/// Keys or values of a paged cache.
template <typename T>
struct Nvfp4Pages {
  const uint8_t* data;
  const uint8_t* scales;
  const float* global_scale;
  T* out;
  PageStride data_stride;
  PageStride scale_stride;
  PageStride out_stride;  ///< `page` is the stride of a request here
  int64_t head_dim;       ///< elements, a multiple of 16; 0 leaves this part out
  int64_t num_pages;
};

/// Dequantisation of a paged cache: out[b, s, h] = cache[block_tables[b, s / page_size], s % page_size, h] for
/// s < seq_lens[b]. Nothing is written for later tokens, nor for a page outside of the cache.
template <typename T, typename IdType>
struct Nvfp4PagedParams {
  Nvfp4Pages<T> parts[2];      ///< keys, values
  const IdType* block_tables;  ///< page of each page_size tokens of a request
  int64_t table_stride;        ///< between requests
  const int32_t* seq_lens;
  int64_t batch_size;
  int64_t max_seq_len;  ///< tokens per request in out
  int64_t num_heads;
  int64_t page_size;
};

template <typename T, typename IdType>
Status Nvfp4DequantizePaged(const Nvfp4PagedParams<T, IdType>& params, Stream stream);

}  // namespace flashinfer
