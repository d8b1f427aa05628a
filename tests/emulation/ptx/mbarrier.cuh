// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/mbarrier.cuh.
#pragma once
#include "shared.cuh"

namespace flashinfer {
namespace ptx {

inline void MbarrierInit(uint32_t barrier, uint32_t arrivals) { emulation::InitMbarrier(barrier, arrivals); }
inline void MbarrierInitFence() {}
inline void MbarrierArrive(uint32_t barrier) { emulation::Arrive(barrier); }
inline void MbarrierArriveExpect(uint32_t barrier, uint32_t bytes) { emulation::Arrive(barrier, bytes); }
inline void MbarrierArriveCopies(uint32_t barrier) { emulation::ArriveAfterCopies(barrier); }
inline void MbarrierArriveCluster(uint32_t barrier, uint32_t rank) {
  emulation::Arrive(emulation::InCluster(barrier, rank));
}
inline bool MbarrierTryWait(uint32_t barrier, uint32_t parity) { return emulation::TestMbarrier(barrier, parity); }
inline bool MbarrierTest(uint32_t barrier, uint32_t parity) {
  if (!emulation::PhaseEnded(barrier, parity)) return false;
  emulation::WaitMbarrier(barrier, parity);
  return true;
}
inline void MbarrierWait(uint32_t barrier, uint32_t parity) { emulation::WaitMbarrier(barrier, parity); }

}  // namespace ptx
}  // namespace flashinfer
