// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/load.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline uint64_t OncePolicy() { return 0; }
inline void LoadOnce(const float* from, uint64_t, float (&x)[4]) { std::memcpy(x, from, 16); }
inline void LoadOnce(bool exists, const float* from, float pad, float (&x)[4]) {
  x[0] = x[1] = x[2] = x[3] = pad;
  if (exists) std::memcpy(x, from, 16);
}

}  // namespace ptx
}  // namespace flashinfer
