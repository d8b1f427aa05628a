// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/barrier.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

inline void BarrierSync(int id, int threads) { emulation::Named(id, threads, true); }
inline void BarrierSyncApart(int id, int threads) { emulation::Named(id, threads, true); }
inline void BarrierArrive(int id, int threads) { emulation::Named(id, threads, false); }
inline bool BarrierAny(int id, int threads, bool value) { return emulation::Named(id, threads, true, value); }

}  // namespace ptx
}  // namespace flashinfer
