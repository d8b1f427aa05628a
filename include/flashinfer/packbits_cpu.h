// SPDX-License-Identifier: Apache-2.0
// packbits on the CPU; parameters in packbits.h.
// Eight bytes are packed at once in a 64-bit word: every non-zero byte becomes a 1, and one multiplication moves the
// eight ones side by side. The compiler does that for eight words per AVX-512 register. Wider elements become such
// bytes first.
//   test  pytest tests/quantization/test_packbits.py      bench  python benchmarks/bench_quantization.py -k packbits
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/parallel.h"
#include "packbits.h"

namespace flashinfer {
namespace cpu {

// A multiplication by these brings bit 8 i of a word to bit 63 - i (big) or 56 + i (little), and nothing else above 55.
constexpr uint64_t GATHER_BIG = 0x8040201008040201ull, GATHER_LITTLE = 0x0102040810204080ull;

constexpr uint64_t Gather(BitOrder order) { return order == BitOrder::kBig ? GATHER_BIG : GATHER_LITTLE; }

/// Pack eight bytes into one byte.
inline uint8_t PackWord(uint64_t word, uint64_t gather) {
  constexpr uint64_t LOW = 0x7F7F7F7F7F7F7F7Full, ONES = 0x0101010101010101ull;
  const uint64_t ones =
      ((((word & LOW) + LOW) | word) >> 7) & ONES;  // the addition carries into bit 7 of a non-zero byte
  return static_cast<uint8_t>((ones * gather) >> 56);
}

/// Pack bytes into bits. Bytes past the end count as zero.
inline void PackBytes(const uint8_t* in, int64_t size, uint8_t* out, uint64_t gather) {
  const int64_t whole = size / 8;
  for (int64_t i = 0; i < whole; ++i) {
    uint64_t word;
    std::memcpy(&word, in + 8 * i, 8);
    out[i] = PackWord(word, gather);
  }
  if (size % 8 != 0) {
    uint64_t word = 0;
    std::memcpy(&word, in + 8 * whole, static_cast<size_t>(size % 8));
    out[whole] = PackWord(word, gather);
  }
}

/// Convert elements to bytes that are non-zero if the element is, in pieces that stay in the L1 cache.
template <typename U>
inline void PackElements(const U* in, int64_t size, uint8_t* out, U mask, uint64_t gather) {
  constexpr int64_t PIECE = 1024;
  uint8_t bytes[PIECE];
  for (int64_t begin = 0; begin < size; begin += PIECE) {
    const int64_t n = size - begin < PIECE ? size - begin : PIECE;
    for (int64_t i = 0; i < n; ++i) bytes[i] = (in[begin + i] & mask) != 0;
    PackBytes(bytes, n, out + begin / 8, gather);
  }
}

/// Least number of output bytes per thread; one unit of ParallelFor.
constexpr int64_t PACK_CHUNK = 1024;

}  // namespace cpu

template <typename U>
Status Packbits(const PackbitsParams& p, Stream) {
  const uint64_t gather = cpu::Gather(p.bit_order);
  const U* input = static_cast<const U*>(p.input);
  const int64_t elements = cpu::PACK_CHUNK * 8, chunks = (p.size + elements - 1) / elements;
  cpu::ParallelFor(chunks, elements, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * elements, last = end * elements < p.size ? end * elements : p.size;
    if constexpr (sizeof(U) == 1) {
      if (p.mask == 0xFF) return cpu::PackBytes(input + first, last - first, p.out + first / 8, gather);
    }
    cpu::PackElements<U>(input + first, last - first, p.out + first / 8, static_cast<U>(p.mask), gather);
  });
  return 0;
}

template <typename IdType>
Status PackedIndptr(const PackedIndptrParams<IdType>& p, Stream) {
  int64_t total = 0;
  bool good = p.indptr[0] >= 0 && p.indptr[p.num_segments] <= p.size;
  for (int64_t s = 0; s < p.num_segments; ++s) {
    const int64_t length = int64_t{p.indptr[s + 1]} - int64_t{p.indptr[s]};
    good = good && length >= 0;
    p.new_indptr[s] = static_cast<int32_t>(total);
    total += (length + 7) / 8;
  }
  p.new_indptr[p.num_segments] = static_cast<int32_t>(total);
  *p.num_bytes = good && total <= INT32_MAX ? total : -1;
  return 0;
}

template <typename IdType>
Status SegmentPackbits(const SegmentPackbitsParams<IdType>& p, Stream) {
  const uint64_t gather = cpu::Gather(p.bit_order);
  const int64_t chunks = (p.num_bytes + cpu::PACK_CHUNK - 1) / cpu::PACK_CHUNK;
  // Threads share the output, not the segments: one long segment among short ones would leave them idle.
  cpu::ParallelFor(chunks, cpu::PACK_CHUNK * 8, [&](int64_t begin, int64_t end) {
    const int64_t last = end * cpu::PACK_CHUNK < p.num_bytes ? end * cpu::PACK_CHUNK : p.num_bytes;
    int64_t byte = begin * cpu::PACK_CHUNK, segment = 0;
    while (byte < last) {
      while (p.new_indptr[segment + 1] <= byte) ++segment;
      const int64_t stop = p.new_indptr[segment + 1] < last ? p.new_indptr[segment + 1] : last;
      const int64_t from = p.indptr[segment] + (byte - p.new_indptr[segment]) * 8;
      const int64_t left = p.indptr[segment + 1] - from, wanted = (stop - byte) * 8;
      cpu::PackBytes(p.input + from, left < wanted ? left : wanted, p.out + byte, gather);
      byte = stop;
    }
  });
  return 0;
}

}  // namespace flashinfer
