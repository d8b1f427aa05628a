// SPDX-License-Identifier: Apache-2.0
// NVFP4 dequantisation on the CPU; parameters in nvfp4_kv.h. A block of 16 codes is one AVX-512 register of floats.
//   test  pytest tests/quantization/test_nvfp4_kv.py      bench  python benchmarks/bench_quantization.py -k nvfp4
#pragma once
#include <cstdint>

#include "cpu/fp4.h"
#include "cpu/parallel.h"
#include "nvfp4_kv.h"

namespace flashinfer {
namespace cpu {

/// Dequantise `blocks` contiguous blocks of 16 elements.
template <typename T>
inline void DequantizeNvfp4Blocks(const uint8_t* data, const uint8_t* scales, float global, T* out, int64_t blocks) {
  constexpr int BLOCK = 16;
  for (int64_t b = 0; b < blocks; ++b) {
    const float scale = DecodeE4M3(scales[b]);
    for (int i = 0; i < BLOCK; i += LANES) {
      const int64_t at = b * BLOCK + i;
      Store(out + at, LoadE2M1(data + at / 2) * scale * global);
    }
  }
}

inline int64_t Offset(const PageStride& stride, int64_t page, int64_t token, int64_t head) {
  return page * stride.page + token * stride.token + head * stride.head;
}

}  // namespace cpu

template <typename T>
Status Nvfp4Dequantize(const Nvfp4DequantizeParams<T>& p, Stream) {
  const float global = *p.global_scale;
  cpu::ParallelFor(p.size / 16, 16, [&](int64_t begin, int64_t end) {
    cpu::DequantizeNvfp4Blocks(p.data + begin * 8, p.scales + begin, global, p.out + begin * 16, end - begin);
  });
  return 0;
}

template <typename T, typename IdType>
Status Nvfp4DequantizePaged(const Nvfp4PagedParams<T, IdType>& p, Stream) {
  const int64_t row = p.num_heads * (p.parts[0].head_dim + p.parts[1].head_dim);
  cpu::ParallelFor(p.batch_size * p.max_seq_len, row, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t request = r / p.max_seq_len, token = r % p.max_seq_len;
      if (token >= p.seq_lens[request]) continue;
      const int64_t page = p.block_tables[request * p.table_stride + token / p.page_size], slot = token % p.page_size;
      for (const Nvfp4Pages<T>& part : p.parts) {
        for (int64_t head = 0; head < (part.head_dim == 0 ? 0 : p.num_heads); ++head) {
          cpu::DequantizeNvfp4Blocks(part.data + cpu::Offset(part.data_stride, page, slot, head),
                                     part.scales + cpu::Offset(part.scale_stride, page, slot, head), *part.global_scale,
                                     part.out + cpu::Offset(part.out_stride, request, token, head), part.head_dim / 16);
        }
      }
    }
  });
  return 0;
}

}  // namespace flashinfer
