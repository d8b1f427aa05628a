// SPDX-License-Identifier: Apache-2.0
// The instructions of include/flashinfer/ptx/ that the general GEMM kernel uses, emulated: copies arrive as late as
// their wait allows, fragments have the layouts of the PTX ISA.
#pragma once
#include "cuda_threads.h"

namespace flashinfer {
namespace ptx {

inline uint32_t SharedAddress(const void* p) {
  return uint32_t(static_cast<const unsigned char*>(p) - emulation::shared);
}

inline void CopyAsync16(uint32_t to, const void* from, bool valid) {
  if (to % 16 != 0 || (valid && reinterpret_cast<uintptr_t>(from) % 16 != 0)) std::abort();
  emulation::fibres[emulation::current].open.push_back({to, from, valid});
}
inline void CopyCommit() {
  emulation::Fibre& f = emulation::fibres[emulation::current];
  f.groups.push_back(std::move(f.open));
  f.open.clear();
}
template <int N>
void CopyWait() {
  auto& groups = emulation::fibres[emulation::current].groups;
  while (groups.size() > N) {
    for (const emulation::Copy& c : groups.front()) {
      std::memset(emulation::shared + c.to, 0, 16);
      if (c.valid) std::memcpy(emulation::shared + c.to, c.from, 16);
    }
    groups.erase(groups.begin());
  }
}
inline void StoreShared16(uint32_t to, const uint4& x) {
  if (to % 16 != 0) std::abort();
  std::memcpy(emulation::shared + to, &x, 16);
}

inline void LoadMatrices(uint32_t (&r)[4], uint32_t address, bool transpose) {
  const auto& all = emulation::MeetWarp({address});
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j) {
      const int row = transpose ? lane % 4 * 2 + j : lane / 4, column = transpose ? lane / 4 : lane % 4 * 2 + j;
      std::memcpy(&pair[j], emulation::shared + all[i * 8 + row][0] + column * 2, 2);
    }
    r[i] = pair[0] | uint32_t(pair[1]) << 16;
  }
}
inline void LdMatrix(uint32_t (&r)[4], uint32_t address) { LoadMatrices(r, address, false); }
inline void LdMatrixTrans(uint32_t (&r)[4], uint32_t address) { LoadMatrices(r, address, true); }

template <typename T>
float Part(uint32_t pair, int i) {
  const uint16_t bits = uint16_t(pair >> (16 * i));
  T x;
  std::memcpy(static_cast<void*>(&x), &bits, 2);
  return float(x);
}

template <typename T>
void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto& all = emulation::MeetWarp({a[0], a[1], a[2], a[3], b0, b1});
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const auto& of_a = all[row % 8 * 4 + k % 8 / 2];
      const auto& of_b = all[column * 4 + k % 8 / 2];
      sum += double(Part<T>(of_a[row / 8 + k / 8 * 2], k % 2)) * Part<T>(of_b[4 + k / 8], k % 2);
    }
    c[i] = float(sum);
  }
}

inline void GridDependencyWait() {}
inline void LaunchDependentsOfFew() {}

}  // namespace ptx
}  // namespace flashinfer
