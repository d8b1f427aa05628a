// SPDX-License-Identifier: Apache-2.0
// NVFP4 dequantisation on CUDA; parameters in nvfp4_kv.h. Bound by DRAM, four fifths of it writes: 2 bytes per element
// against 9/16 read. A thread turns 8 codes (4 bytes) into one 16-byte store, so a warp writes 512 bytes in a row; with
// a whole block of 16 per thread every store would touch twice as many sectors.
//
//   flat    matrices: thread t makes vector t
//   paged   a block takes some tokens of one head, keys or values: threads (x: vectors of the head, y: tokens), grid
//           (x: keys then values by token, y: heads, z: requests)
//   test  pytest tests/quantization/test_nvfp4_kv.py      bench  python benchmarks/bench_quantization.py -k nvfp4
#pragma once
#include "nvfp4_kv.h"
#include "utils.cuh"
#include "vec_dtypes.cuh"

namespace flashinfer {
namespace nvfp4 {

constexpr int THREADS = 128, VEC = 8;  // codes per thread

/// Decode the 8 codes of a word. A code in the top bits of a half is its value times 2^-14; the scale compensates for
/// that.
__device__ __forceinline__ void Decode(uint32_t word, float scale, float global, float (&y)[VEC]) {
  const float factor = scale * 16384.f;
#pragma unroll
  for (int i = 0; i < VEC / 2; ++i) {
    const uint32_t codes = word >> (4 * i);  // codes i and i + 4, at the bottom of each half word
    const uint32_t bits = ((codes & 0x00070007u) << 9) | ((codes & 0x00080008u) << 12);
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&bits));
    y[i] = pair.x * factor * global;
    y[i + VEC / 2] = pair.y * factor * global;
  }
}

__device__ __forceinline__ float DecodeScale(uint8_t byte) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3)));
}

/// Compute one vector of output from its word and scale. ALIGNED: the word is aligned to 4 bytes and the output to 16.
template <typename T, bool ALIGNED>
__device__ __forceinline__ void DequantizeVector(const uint8_t* data, uint8_t scale, float global, T* out) {
  uint32_t word;
  if constexpr (ALIGNED) {
    word = *reinterpret_cast<const uint32_t*>(data);
  } else {
    word = data[0] | data[1] << 8 | data[2] << 16 | uint32_t(data[3]) << 24;
  }
  float y[VEC];
  Decode(word, DecodeScale(scale), global, y);
  const Vec<T, VEC> rounded = RoundTo<T, VEC>(y);
  if constexpr (ALIGNED) {
    rounded.Store(out);
  } else {
#pragma unroll
    for (int i = 0; i < VEC; ++i) out[i] = rounded[i];
  }
}

template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(THREADS) Nvfp4DequantizeKernel(const __grid_constant__ Nvfp4DequantizeParams<T> p) {
  const int64_t vector = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (vector * VEC >= p.size) return;
  DequantizeVector<T, ALIGNED>(p.data + vector * 4, p.scales[vector / 2], *p.global_scale, p.out + vector * VEC);
}

/// Grid of the paged kernel.
struct PagedGrid {
  uint32_t tiles;  // tiles of tokens
  FastDivisor page_size;
};

template <typename T, typename IdType, bool ALIGNED>
__global__ void __launch_bounds__(THREADS)
    Nvfp4PagedKernel(const __grid_constant__ Nvfp4PagedParams<T, IdType> p, PagedGrid grid) {
  const bool is_value = blockIdx.x >= grid.tiles;
  const Nvfp4Pages<T>& part = is_value ? p.parts[1] : p.parts[0];
  const uint32_t tile = is_value ? blockIdx.x - grid.tiles : blockIdx.x;
  const uint32_t token = tile * blockDim.y + threadIdx.y, head = blockIdx.y, vectors = uint32_t(part.head_dim) / VEC;
  for (int64_t request = blockIdx.z; request < p.batch_size; request += gridDim.z) {
    if (int64_t(token) >= min(int64_t(p.seq_lens[request]), p.max_seq_len)) continue;
    const uint32_t index = grid.page_size.Divide(token), slot = token - index * grid.page_size.divisor;
    const int64_t page = p.block_tables[request * p.table_stride + index];
    if (page < 0 || page >= part.num_pages) continue;
    const uint8_t* data =
        part.data + page * part.data_stride.page + slot * part.data_stride.token + head * part.data_stride.head;
    const uint8_t* scales =
        part.scales + page * part.scale_stride.page + slot * part.scale_stride.token + head * part.scale_stride.head;
    T* out = part.out + request * part.out_stride.page + token * part.out_stride.token + head * part.out_stride.head;
    for (uint32_t v = threadIdx.x; v < vectors; v += blockDim.x) {
      DequantizeVector<T, ALIGNED>(data + v * 4, scales[v / 2], *part.global_scale, out + v * VEC);
    }
  }
}

template <typename T>
bool IsPartAligned(const Nvfp4Pages<T>& part) {
  if (part.head_dim == 0) return true;
  auto divides = [](const PageStride& s, int n) { return s.page % n == 0 && s.token % n == 0 && s.head % n == 0; };
  return IsAligned(part.data, 4) && IsAligned(part.out, 16) && divides(part.data_stride, 4) &&
         divides(part.out_stride, VEC);
}

}  // namespace nvfp4

template <typename T>
Status Nvfp4Dequantize(const Nvfp4DequantizeParams<T>& p, Stream stream) {
  using namespace nvfp4;
  if (p.size == 0) return cudaSuccess;
  const int64_t blocks = CeilDiv(p.size / VEC, THREADS);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const bool aligned = IsAligned(p.data, 4) && IsAligned(p.out, 16);
  auto kernel = aligned ? Nvfp4DequantizeKernel<T, true> : Nvfp4DequantizeKernel<T, false>;
  return Launch(kernel, dim3(blocks), dim3(THREADS), false, stream, p);
}

template <typename T, typename IdType>
Status Nvfp4DequantizePaged(const Nvfp4PagedParams<T, IdType>& p, Stream stream) {
  using namespace nvfp4;
  const int64_t head_dim = std::max(p.parts[0].head_dim, p.parts[1].head_dim);
  if (p.batch_size == 0 || p.max_seq_len == 0 || p.num_heads == 0 || head_dim == 0) return cudaSuccess;
  if (p.max_seq_len > INT32_MAX / 2 || p.page_size > INT32_MAX || p.num_heads > 65535) return cudaErrorInvalidValue;
  const int lanes = int(std::min<int64_t>(head_dim / VEC, THREADS));
  const dim3 block(lanes, THREADS / lanes);
  const PagedGrid grid{uint32_t(CeilDiv(p.max_seq_len, block.y)), FastDivisor(uint32_t(p.page_size))};
  const dim3 blocks(2 * grid.tiles, unsigned(p.num_heads), unsigned(std::min<int64_t>(p.batch_size, 65535)));
  const bool aligned = IsPartAligned(p.parts[0]) && IsPartAligned(p.parts[1]);
  auto kernel = aligned ? Nvfp4PagedKernel<T, IdType, true> : Nvfp4PagedKernel<T, IdType, false>;
  return Launch(kernel, blocks, block, false, stream, p, grid);
}

}  // namespace flashinfer
