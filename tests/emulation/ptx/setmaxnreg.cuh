// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/setmaxnreg.cuh.
#pragma once

namespace flashinfer {
namespace ptx {

template <int COUNT>
void ReleaseRegisters() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "registers of setmaxnreg");
}
template <int COUNT>
void TakeRegisters() {
  ReleaseRegisters<COUNT>();
}

}  // namespace ptx
}  // namespace flashinfer
