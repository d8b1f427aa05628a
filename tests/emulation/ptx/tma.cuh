// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/tma.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline void PrefetchTensorMap(const void*) {}
inline uint64_t PolicyEvictFirst() { return 0; }
inline uint64_t PolicyEvictLast() { return 0; }
inline uint64_t PolicyEvictNormal() { return 0; }

/// The bit of this block in its cluster.
inline uint32_t ThisBit() { return 1u << emulation::ThisBlock().rank; }
inline void LoadBox(uint32_t to, const void* map, uint32_t barrier, int x, int y) {
  emulation::LoadBoxLater(to, map, barrier, {x, y}, ThisBit());
}
inline void LoadBox(uint32_t to, const void* map, uint32_t barrier, int x, int y, int z) {
  emulation::LoadBoxLater(to, map, barrier, {x, y, z}, ThisBit());
}
inline void LoadBox(uint32_t to, const void* map, uint32_t barrier, int x, int y, int z, uint64_t) {
  emulation::LoadBoxLater(to, map, barrier, {x, y, z}, ThisBit());
}
inline void LoadBoxMulticast(uint32_t to, const void* map, uint32_t barrier, int x, int y, int z, uint16_t blocks) {
  emulation::LoadBoxLater(to, map, barrier, {x, y, z}, blocks);
}
inline void LoadBulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  emulation::LoadBulkLater(to, from, bytes, barrier);
}
inline void FenceAsyncProxy() { emulation::Publish(); }
inline void StoreBox(const void* map, uint32_t from, int x, int y) { emulation::StoreBoxLater(map, from, {x, y}); }
inline void StoreBox(const void* map, uint32_t from, int x, int y, int z) {
  emulation::StoreBoxLater(map, from, {x, y, z});
}
inline void CommitStores() { emulation::CommitBulkStores(); }
template <int PENDING>
void WaitStoresRead() {
  emulation::WaitBulkStores(PENDING, false);
}

}  // namespace ptx
}  // namespace flashinfer
