// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/send.cuh.
#pragma once
#include "cluster.cuh"

namespace flashinfer {
namespace ptx {

inline void ExpectBytes(uint64_t* barrier, uint32_t bytes) {
  if (threadIdx.x != 0) return;
  emulation::InitMbarrier(emulation::AddressOf(barrier), 1);
  emulation::Arrive(emulation::AddressOf(barrier), bytes);
}
inline void ExpectMoreBytes(uint64_t* barrier, uint32_t bytes) {
  if (ClusterSize() > 1) emulation::Arrive(emulation::AddressOf(barrier), bytes);
}
inline void WaitForBytes(uint64_t* barrier, uint32_t turn = 0) {
  if (ClusterSize() == 1) return __syncthreads();
  emulation::WaitMbarrier(emulation::AddressOf(barrier), turn % 2);
}
inline uint32_t SharedInBlock(const void* local, uint32_t rank) {
  return emulation::InCluster(emulation::AddressOf(local), rank);
}
inline void Send(uint32_t* local, uint32_t rank, uint32_t word, uint64_t* barrier) {
  if (ClusterSize() == 1) {
    *local = word;
  } else {
    emulation::SendLater(SharedInBlock(local, rank), &word, 4, SharedInBlock(barrier, rank));
  }
}
inline void Send(uint4* local, uint32_t rank, const uint4& words, uint64_t* barrier) {
  if (ClusterSize() == 1) {
    *local = words;
  } else {
    emulation::SendLater(SharedInBlock(local, rank), &words, 16, SharedInBlock(barrier, rank));
  }
}

}  // namespace ptx
}  // namespace flashinfer
