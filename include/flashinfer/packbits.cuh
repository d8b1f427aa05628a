// SPDX-License-Identifier: Apache-2.0
// packbits on CUDA; parameters in packbits.h. Bound by DRAM: the input is read once, the output is an eighth of it or
// less.
//
//   PackbitsKernel         a thread packs 16 elements of one byte (one 16-byte load, a 2-byte store), or 8 wider ones
//   PackedIndptrKernel     one block: a running sum of the segments' bytes
//   SegmentPackbitsKernel  a thread packs 16 elements of a segment to two bytes. Segments start anywhere, so it loads the
//                          two aligned 16-byte vectors around its elements and shifts them; the second is its neighbour's
//                          first and comes from L1. Blocks share the output bytes, whatever the lengths of the segments,
//                          and look up the segment of their first byte.
//
// Four bytes become four bits by a dot product with powers of two (dp4a); no votes among lanes, so no lane waits.
//   test  pytest tests/quantization/test_packbits.py      bench  python benchmarks/bench_quantization.py -k packbits
#pragma once
#include "packbits.h"
#include "utils.cuh"
#include "vec_dtypes.cuh"
#include "warp.cuh"

namespace flashinfer {
namespace packing {

constexpr int THREADS = 128;

/// Return a word with 1 in each byte where the input byte is not zero.
__device__ __forceinline__ uint32_t NonZeroBytes(uint32_t word) {
  return ((((word & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | word) >> 7) & 0x01010101u;
}

/// Pack eight bytes, two words in memory order, into one byte.
__device__ __forceinline__ uint32_t PackWords(uint32_t first, uint32_t second, bool big) {
  const uint32_t low = __dp4a(NonZeroBytes(first), big ? 0x10204080u : 0x08040201u, 0u);
  return __dp4a(NonZeroBytes(second), big ? 0x01020408u : 0x80402010u, low);
}

/// Pack 16 bytes into two bytes.
__device__ __forceinline__ uint16_t PackVector(uint4 v, bool big) {
  return uint16_t(PackWords(v.x, v.y, big) | (PackWords(v.z, v.w, big) << 8));
}

/// Pack up to eight elements, read one by one, into one byte.
template <typename U>
__device__ __forceinline__ uint8_t PackSlowly(const U* input, int64_t count, U mask, bool big) {
  uint32_t bits = 0;
  for (int i = 0; i < 8 && i < count; ++i) {
    if ((input[i] & mask) != 0) bits |= big ? 0x80u >> i : 1u << i;
  }
  return uint8_t(bits);
}

/// Kernel of packbits: ELEMENTS elements per thread. VECTOR: input and output are aligned.
template <typename U, int ELEMENTS, bool VECTOR>
__global__ void __launch_bounds__(THREADS) PackbitsKernel(const __grid_constant__ PackbitsParams p) {
  const int64_t begin = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * ELEMENTS;
  const U* input = static_cast<const U*>(p.input) + begin;
  const bool big = p.bit_order == BitOrder::kBig;
  const U mask = U(p.mask);
  if (VECTOR && begin + ELEMENTS <= p.size) {
    constexpr int VEC = 16 / sizeof(U), VECTORS = ELEMENTS / VEC;
    Vec<U, VEC> v[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) v[i] = Vec<U, VEC>::Load(input + i * VEC);
    if constexpr (sizeof(U) == 1) {
      const uint32_t each = uint32_t(mask) * 0x01010101u;
      uint4 words = *reinterpret_cast<const uint4*>(&v[0]);
      words = make_uint4(words.x & each, words.y & each, words.z & each, words.w & each);
      *reinterpret_cast<uint16_t*>(p.out + begin / 8) = PackVector(words, big);
    } else {
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) {
        const bool one = (v[i / VEC][i % VEC] & mask) != 0;
        bits |= one ? (big ? 0x80u >> i : 1u << i) : 0u;
      }
      p.out[begin / 8] = uint8_t(bits);
    }
  } else {
    for (int i = 0; i < ELEMENTS && begin + i < p.size; i += 8) {
      p.out[(begin + i) / 8] = PackSlowly(input + i, p.size - begin - i, mask, big);
    }
  }
}

/// Return the inclusive prefix sum over the block. `scratch` holds 32 numbers. Ends with a barrier, so that `scratch`
/// can be reused.
__device__ __forceinline__ int64_t BlockScan(int64_t x, int64_t* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x = WarpInclusiveScan(x);
  if (lane == 31) scratch[warp] = x;
  __syncthreads();
  for (int i = 0; i < warp; ++i) x += scratch[i];
  __syncthreads();
  return x;
}

constexpr int SCAN_THREADS = 256;

template <typename IdType>
__global__ void __launch_bounds__(SCAN_THREADS)
    PackedIndptrKernel(const __grid_constant__ PackedIndptrParams<IdType> p) {
  __shared__ int64_t scratch[32];
  __shared__ int64_t carry;
  bool bad = p.indptr[0] < 0 || p.indptr[p.num_segments] > p.size;
  int64_t before = 0;
  for (int64_t first = 0; first < p.num_segments; first += SCAN_THREADS) {
    const int64_t segment = first + threadIdx.x;
    const bool inside = segment < p.num_segments;
    const int64_t length = inside ? int64_t(p.indptr[segment + 1]) - int64_t(p.indptr[segment]) : 0;
    bad = bad || length < 0;
    const int64_t sum = before + BlockScan((length + 7) / 8, scratch);
    if (inside) p.new_indptr[segment + 1] = int32_t(sum);
    if (threadIdx.x == SCAN_THREADS - 1) carry = sum;
    __syncthreads();
    before = carry;
    bad = bad || before > INT32_MAX;
  }
  bad = __syncthreads_or(bad);
  if (threadIdx.x == 0) {
    p.new_indptr[0] = 0;
    *p.num_bytes = bad ? -1 : before;
  }
}

/// Return the 16 bytes at `offset` (0 to 15) of two adjacent vectors.
__device__ __forceinline__ uint4 Extract(uint4 first, uint4 second, uint32_t offset) {
  uint32_t w[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) w[i] = offset & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = offset & 4 ? w[i + 1] : w[i];
  const uint32_t shift = (offset & 3) * 8;
  return make_uint4(__funnelshift_r(w[0], w[1], shift), __funnelshift_r(w[1], w[2], shift),
                    __funnelshift_r(w[2], w[3], shift), __funnelshift_r(w[3], w[4], shift));
}

/// Return the last segment that starts at or before `byte`: 0 <= byte < new_indptr[num_segments]. Empty segments with
/// the same start are skipped.
__device__ __forceinline__ int64_t SegmentOf(const int32_t* new_indptr, int64_t num_segments, int64_t byte) {
  int64_t low = 0, high = num_segments;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (new_indptr[middle] <= byte) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

constexpr int SEGMENT_THREADS = 256;

template <typename IdType>
__global__ void __launch_bounds__(SEGMENT_THREADS)
    SegmentPackbitsKernel(const __grid_constant__ SegmentPackbitsParams<IdType> p) {
  const int64_t block_begin = int64_t(blockIdx.x) * SEGMENT_THREADS * 2, begin = block_begin + threadIdx.x * 2;
  const bool big = p.bit_order == BitOrder::kBig;
  int64_t segment = SegmentOf(p.new_indptr, p.num_segments, block_begin);  // the same for all: one load serves a warp
  if (begin >= p.num_bytes) return;
  if (p.new_indptr[segment + 1] <= begin) segment = SegmentOf(p.new_indptr, p.num_segments, begin);
  const int64_t from = int64_t(p.indptr[segment]) + (begin - p.new_indptr[segment]) * 8;
  const uint8_t* input = p.input + from;
  const uint32_t offset = uint32_t(reinterpret_cast<uintptr_t>(input) & 15);
  // Both bytes whole and of this segment, and the two vectors inside the tensor.
  if (int64_t(p.indptr[segment + 1]) - from >= 16 && from >= offset && from - offset + 32 <= p.size) {
    const uint4* vectors = reinterpret_cast<const uint4*>(input - offset);
    const uint4 first = vectors[0], second = vectors[1];
    *reinterpret_cast<uint16_t*>(p.out + begin) = PackVector(Extract(first, second, offset), big);
    return;
  }
  for (int64_t byte = begin; byte < begin + 2 && byte < p.num_bytes; ++byte) {
    if (p.new_indptr[segment + 1] <= byte) segment = SegmentOf(p.new_indptr, p.num_segments, byte);
    const int64_t at = int64_t(p.indptr[segment]) + (byte - p.new_indptr[segment]) * 8;
    p.out[byte] = PackSlowly<uint8_t>(p.input + at, int64_t(p.indptr[segment + 1]) - at, 0xFF, big);
  }
}

}  // namespace packing

template <typename U>
Status Packbits(const PackbitsParams& p, Stream stream) {
  constexpr int ELEMENTS = sizeof(U) == 1 ? 16 : 8;
  if (p.size == 0) return cudaSuccess;
  const int64_t blocks = CeilDiv(p.size, int64_t(packing::THREADS) * ELEMENTS);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  auto kernel =
      IsAligned(p.input, 16) ? packing::PackbitsKernel<U, ELEMENTS, true> : packing::PackbitsKernel<U, ELEMENTS, false>;
  return Launch(kernel, dim3(blocks), dim3(packing::THREADS), false, stream, p);
}

template <typename IdType>
Status PackedIndptr(const PackedIndptrParams<IdType>& p, Stream stream) {
  return Launch(packing::PackedIndptrKernel<IdType>, dim3(1), dim3(packing::SCAN_THREADS), false, stream, p);
}

template <typename IdType>
Status SegmentPackbits(const SegmentPackbitsParams<IdType>& p, Stream stream) {
  if (p.num_bytes == 0) return cudaSuccess;
  const int64_t blocks = CeilDiv(p.num_bytes, int64_t(packing::SEGMENT_THREADS) * 2);
  return Launch(packing::SegmentPackbitsKernel<IdType>, dim3(blocks), dim3(packing::SEGMENT_THREADS), false, stream, p);
}

}  // namespace flashinfer
