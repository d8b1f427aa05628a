// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/mma.cuh.
#pragma once
#include "shared.cuh"
#include "matrices.cuh"

namespace flashinfer {
namespace ptx {

inline void LdMatrix(uint32_t (&r)[4], uint32_t address) { LoadMatrices(r, address, false); }
inline void LdMatrixTrans(uint32_t (&r)[4], uint32_t address) { LoadMatrices(r, address, true); }
inline uint32_t Transposed(uint32_t x) { return TransposeInWarp(x); }
constexpr bool HAS_ST_MATRIX = true;
inline void StMatrix(uint32_t address, const uint32_t (&r)[4]) { StoreMatrices(address, r, false); }
inline void LoadFragment(uint32_t (&r)[4], uint32_t address) { std::memcpy(r, emulation::Memory(address, 16, 16), 16); }

template <typename T>
void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto& all = emulation::MeetWarp({a[0], a[1], a[2], a[3], b0, b1});
  static const float* const values =
      emulation::TableOf(std::is_same<T, __half>::value ? emulation::Kind::kF16 : emulation::Kind::kBf16);
  const int lane = emulation::Lane();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const uint32_t of_a = all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const uint32_t of_b = all[column * 4 + k % 8 / 2][4 + k / 8];
      sum += double(values[of_a >> (16 * (k % 2)) & 0xffff]) * values[of_b >> (16 * (k % 2)) & 0xffff];
    }
    c[i] = float(sum);
  }
}

/// Round to 11 bits, halves away from zero.
inline uint32_t ToTf32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return std::isfinite(x) ? (bits + 0x1000) & 0xffffe000 : bits;
}
inline void MmaTf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto& all = emulation::MeetWarp({a[0], a[1], a[2], a[3], b0, b1});
  const int lane = emulation::Lane();
  auto value = [&](int of, int word) {
    float x;
    std::memcpy(&x, &all[of][word], 4);
    return double(x);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = c[i];
    for (int k = 0; k < 8; ++k) {
      sum += value(row % 8 * 4 + k % 4, row / 8 + k / 4 * 2) * value(column * 4 + k % 4, 4 + k / 4);
    }
    c[i] = float(sum);
  }
}

}  // namespace ptx
}  // namespace flashinfer
