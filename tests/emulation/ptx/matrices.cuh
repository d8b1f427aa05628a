// SPDX-License-Identifier: Apache-2.0
// ldmatrix, stmatrix and movmatrix: 8 x 8 matrices of 16 bits in a warp.
#pragma once

namespace flashinfer {
namespace ptx {

inline void LoadMatrices(uint32_t (&r)[4], uint32_t address, bool transpose) {
  const auto& all = emulation::MeetWarp({address});
  const int lane = emulation::Lane();
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j) {
      const int row = transpose ? lane % 4 * 2 + j : lane / 4, column = transpose ? lane / 4 : lane % 4 * 2 + j;
      std::memcpy(&pair[j], emulation::Memory(all[i * 8 + row][0], 16, 16) + column * 2, 2);
    }
    r[i] = pair[0] | uint32_t(pair[1]) << 16;
  }
}

/// Each lane writes the row whose address it gives.
template <int COUNT>
void StoreMatrices(uint32_t address, const uint32_t (&r)[COUNT], bool transpose) {
  emulation::Words words{};
  for (int i = 0; i < COUNT; ++i) words[i] = r[i];
  const auto& all = emulation::MeetWarp(words);
  const int lane = emulation::Lane(), matrix = lane / 8, row = lane % 8;
  if (matrix >= COUNT) return;
  uint16_t line[8];
  for (int c = 0; c < 8; ++c) {
    const int i = transpose ? c : row, j = transpose ? row : c;
    line[c] = uint16_t(all[i * 4 + j / 2][matrix] >> (16 * (j % 2)));
  }
  std::memcpy(emulation::Memory(address, 16, 16), line, 16);
  emulation::MarkStore(address, 16);
}

inline uint32_t TransposeInWarp(uint32_t x) {
  const auto& all = emulation::MeetWarp({x});
  const int lane = emulation::Lane();
  uint32_t y = 0;
  for (int j = 0; j < 2; ++j) {
    const int row = lane % 4 * 2 + j, column = lane / 4;
    y |= (all[row * 4 + column / 2][0] >> (16 * (column % 2)) & 0xffff) << (16 * j);
  }
  return y;
}

}  // namespace ptx
}  // namespace flashinfer
