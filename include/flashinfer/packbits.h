// SPDX-License-Identifier: Apache-2.0
// Truth values packed into bits: parameters and entries, shared by both backends.
//   packbits          bit i of the output is 1 where element i is not zero, eight elements to a byte
//   segment_packbits  the same for each segment of a ragged array; a segment starts on a byte and is padded with zeros
// Elements are read as unsigned integers of their size. An element counts as zero if all bits of a mask are zero: the
// mask omits the sign bit of a float, because -0.0 is zero. Defined in packbits.cuh (CUDA) and packbits_cpu.h (CPU).
//   test  pytest tests/quantization/test_packbits.py      bench  python benchmarks/bench_quantization.py -k packbits
#pragma once
#include "backend.h"

namespace flashinfer {

enum class BitOrder : int { kBig, kLittle };  ///< element 0 in bit 7 (as numpy does by default), or in bit 0

struct PackbitsParams {
  const void* input;
  uint8_t* out;   ///< ceil(size / 8)
  int64_t size;   ///< elements
  uint64_t mask;  ///< bits that make an element non-zero
  BitOrder bit_order;
};

/// Pack all elements. U is the unsigned integer type of the size of an element.
template <typename U>
Status Packbits(const PackbitsParams& params, Stream stream);

template <typename IdType>
struct PackedIndptrParams {
  const IdType* indptr;  ///< num_segments + 1 offsets into the elements
  int32_t* new_indptr;   ///< num_segments + 1 offsets into the bytes
  int64_t* num_bytes;    ///< new_indptr[num_segments], or -1 when indptr is no partition of a part of [0, size]
  int64_t num_segments;
  int64_t size;
};

/// Byte offsets of packed segments.
template <typename IdType>
Status PackedIndptr(const PackedIndptrParams<IdType>& params, Stream stream);

template <typename IdType>
struct SegmentPackbitsParams {
  const uint8_t* input;
  const IdType* indptr;
  const int32_t* new_indptr;
  uint8_t* out;
  int64_t size;       ///< elements of input
  int64_t num_bytes;  ///< size of out in bytes
  int64_t num_segments;
  BitOrder bit_order;
};

template <typename IdType>
Status SegmentPackbits(const SegmentPackbitsParams<IdType>& params, Stream stream);

}  // namespace flashinfer
