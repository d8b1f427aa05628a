// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/cp_async.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline void CopyAsync16(uint32_t to, const void* from, bool valid) { emulation::CopyLater(to, from, 16, valid); }
inline void CopyAsync16(uint32_t to, const void* from, bool valid, bool) { emulation::CopyLater(to, from, 16, valid); }
inline void CopyAsync4(uint32_t to, const void* from) { emulation::CopyLater(to, from, 4, true); }
inline void CopyCommit() { emulation::CommitCopies(); }
template <int N>
void CopyWait() {
  emulation::WaitCopies(N);
}

template <typename T>
void StoreSharedAny(uint32_t to, const T& x) {
  std::memcpy(emulation::Memory(to, sizeof(T), sizeof(T)), &x, sizeof(T));
  emulation::MarkStore(to, sizeof(T));
}
inline void StoreShared4(uint32_t to, uint32_t x) { StoreSharedAny(to, x); }
inline void StoreShared8(uint32_t to, float x, float y) { StoreSharedAny(to, float2{x, y}); }
inline void StoreShared16(uint32_t to, const uint4& x) { StoreSharedAny(to, x); }
inline uint32_t LoadShared4(uint32_t from) {
  uint32_t x;
  std::memcpy(&x, emulation::Memory(from, 4, 4), 4);
  return x;
}
inline float2 LoadShared8(uint32_t from) {
  float2 x;
  std::memcpy(&x, emulation::Memory(from, 8, 8), 8);
  return x;
}
inline float4 LoadShared16(uint32_t from) {
  float4 x;
  std::memcpy(&x, emulation::Memory(from, 16, 16), 16);
  return x;
}

}  // namespace ptx
}  // namespace flashinfer
