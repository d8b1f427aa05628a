// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/cluster.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline uint32_t ClusterRank() { return emulation::ThisBlock().rank; }
inline uint32_t ClusterSize() { return uint32_t(emulation::state.blocks.size()); }
inline uint32_t ClusterId() { return blockIdx.x / ClusterSize(); }
inline void ClusterArrive() { emulation::ArriveCluster(); }
inline void ClusterArriveRelaxed() { emulation::ArriveCluster(); }
inline void ClusterArriveApart() { emulation::ArriveCluster(); }
inline void ClusterWait() { emulation::WaitCluster(); }
inline void ClusterWaitApart() {
  if (ClusterSize() > 1) emulation::WaitCluster();
}
inline void ClusterSync() {
  ClusterArrive();
  ClusterWait();
}
template <typename T>
T* InBlock(T* local, uint32_t rank) {
  const uint32_t address = emulation::InCluster(emulation::AddressOf(local), rank);
  return reinterpret_cast<T*>(emulation::Memory(address, sizeof(T), alignof(T)));
}
inline float LoadShared4(uint32_t address, uint32_t rank) {
  float x;
  std::memcpy(&x, emulation::Memory(emulation::InCluster(address, rank), 4, 4), 4);
  return x;
}
inline float4 LoadShared16(uint32_t address, uint32_t rank) {
  float4 x;
  std::memcpy(&x, emulation::Memory(emulation::InCluster(address, rank), 16, 16), 16);
  return x;
}
inline void StoreShared(uint32_t* local, uint32_t rank, uint32_t value) { *InBlock(local, rank) = value; }

}  // namespace ptx
}  // namespace flashinfer
