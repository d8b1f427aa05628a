// SPDX-License-Identifier: Apache-2.0
// Appending to a paged KV cache in NVFP4 on the CPU; formulas and parameters in page_nvfp4.h.
// A block of 16 is one register of AVX-512, two of AVX2: widen, maximum, divide, round, pack two codes to a byte.
//   test  pytest tests/page/test_page_nvfp4.py      bench  python benchmarks/bench_page_nvfp4.py
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/fp4.h"
#include "cpu/parallel.h"
#include "cpu/vec.h"
#include "page_nvfp4.h"

namespace flashinfer {
namespace cpu {

/// Quantise 16 elements to 8 bytes of codes, and return the bits of the scale.
template <typename T>
inline uint8_t QuantizeNvfp4Block(const T* x, float global, uint8_t* codes) {
  static_assert(NVFP4_BLOCK % LANES == 0, "a block is whole registers");
  float values[NVFP4_BLOCK], largest = 0;
  uint32_t code[NVFP4_BLOCK];
  for (int i = 0; i < NVFP4_BLOCK; i += LANES) Store(values + i, Load(x + i));
  for (int i = 0; i < NVFP4_BLOCK; ++i) largest = std::max(largest, std::fabs(values[i]));
  const float8_e4m3 sf(largest / (6.0f * global));
  if ((sf.bits & 0x7F) == 0) {
    std::memset(codes, 0, NVFP4_BLOCK / 2);
    return sf.bits;
  }
  const float scale = static_cast<float>(sf) * global;
  for (int i = 0; i < NVFP4_BLOCK; i += LANES) {
    const UintVec bits = BitCast<UintVec>(Load(values + i));
    const Vec magnitude = BitCast<Vec>(bits & 0x7FFFFFFFu) / scale;
    const UintVec rounded = Encode<E2M1Format, UintVec>(magnitude) | ((bits & 0x80000000u) >> 28);
    std::memcpy(code + i, &rounded, sizeof(rounded));
  }
  for (int i = 0; i < NVFP4_BLOCK / 2; ++i) codes[i] = static_cast<uint8_t>(code[2 * i] | code[2 * i + 1] << 4);
  return sf.bits;
}

template <typename T>
inline void QuantizeNvfp4Row(const Nvfp4Part<T>& part, const Nvfp4AppendParams<T>& p, int64_t row, const Slot& slot) {
  const float global = part.global_on_device != nullptr ? *part.global_on_device : part.global;
  auto offset = [&](const SlotStride& stride, int64_t head) {
    return slot.page * stride.page + slot.entry * stride.entry + head * stride.head;
  };
  for (int64_t head = 0; head < p.num_heads; ++head) {
    const T* x = part.rows + row * part.row_stride.token + head * part.row_stride.head;
    uint8_t* codes = part.codes + offset(part.codes_stride, head);
    uint8_t* scales = part.scales + offset(part.scales_stride, head);
    for (int64_t block = 0; block < p.head_dim / NVFP4_BLOCK; ++block) {
      scales[block] = QuantizeNvfp4Block(x + block * NVFP4_BLOCK, global, codes + block * NVFP4_BLOCK / 2);
    }
  }
}

inline Slot MappedSlot(const SlotMapping& m, int64_t row) {
  const int64_t slot =
      m.is_int64 ? static_cast<const int64_t*>(m.slots)[row] : static_cast<const int32_t*>(m.slots)[row];
  if (slot < 0 || slot >= m.num_slots) return {-1, 0};
  return {slot / m.page_size, slot % m.page_size};
}

}  // namespace cpu

template <typename T>
Status Nvfp4AppendPaged(const Nvfp4AppendParams<T>& p, Stream) {
  cpu::ParallelFor(p.table.num_rows, 2 * p.num_heads * p.head_dim, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Slot slot{};
      if (p.mapping.slots != nullptr) {
        slot = cpu::MappedSlot(p.mapping, row);
      } else {
        FindSlot(p.table, row, &slot);
      }
      if (slot.page < 0) continue;
      cpu::QuantizeNvfp4Row(p.key, p, row, slot);
      cpu::QuantizeNvfp4Row(p.value, p, row, slot);
    }
  });
  return 0;
}

}  // namespace flashinfer
