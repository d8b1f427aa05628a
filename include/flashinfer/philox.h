// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 (Salmon et al., SC'11): random words as a function of a key and a counter, the same on CPU and GPU.
// There is no state to keep: a draw of output row `row` at position `offset` of the stream of `seed` can be made
// again, anywhere.
//   test  pytest tests/sampling/test_sampling_random.py
#pragma once
#include <cstdint>

#include "host_device.h"

namespace flashinfer {

struct PhiloxWords {
  uint32_t x[4];
};

FLASHINFER_HD PhiloxWords Philox(uint64_t seed, uint64_t offset, uint64_t row) {
  uint32_t c0 = uint32_t(offset), c1 = uint32_t(offset >> 32), c2 = uint32_t(row), c3 = uint32_t(row >> 32);
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c1 = uint32_t(b);
    c3 = uint32_t(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Return 64 random bits.
FLASHINFER_HD uint64_t RandomBits(uint64_t seed, uint64_t offset, uint64_t row) {
  const PhiloxWords words = Philox(seed, offset, row);
  return uint64_t(words.x[1]) << 32 | words.x[0];
}

/// Return a random float in [0, 1), a multiple of 2^-24.
FLASHINFER_HD float RandomUnit(uint64_t seed, uint64_t offset, uint64_t row) {
  return float(Philox(seed, offset, row).x[0] >> 8) * 5.9604644775390625e-8f;
}

}  // namespace flashinfer
