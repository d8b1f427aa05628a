// SPDX-License-Identifier: Apache-2.0
// Emulates include/flashinfer/ptx/wgmma.cuh, for any N.
#pragma once

namespace flashinfer {
namespace ptx {

enum class WgmmaType { kBf16, kF16, kE4m3 };

inline void WgmmaFence() { emulation::state.current->is_fenced = true; }
inline void WgmmaCommit() { emulation::CommitProducts(); }
template <int PENDING>
void WgmmaWait() {
  emulation::WaitProducts(PENDING);
}
template <int COUNT>
void WgmmaPin(float (&)[COUNT]) {}
template <int COUNT>
void WgmmaPin(uint32_t (&)[COUNT]) {}

template <WgmmaType TYPE, int N, bool TRANSPOSE_A = false, bool TRANSPOSE_B = false>
struct Wgmma {
  static_assert(N % 8 == 0 && N <= 256, "columns of wgmma");
  static void Run(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) { Issue(d, a, b, accumulate, nullptr); }
  static void Run(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    Issue(d, 0, b, accumulate, a);
  }

 private:
  static void Issue(float* d, uint64_t a, uint64_t b, bool accumulate, const uint32_t* fragment) {
    emulation::Product p;
    p.kind = TYPE == WgmmaType::kBf16  ? emulation::Kind::kBf16
             : TYPE == WgmmaType::kF16 ? emulation::Kind::kF16
                                       : emulation::Kind::kE4m3;
    p.n = N, p.transpose_a = TRANSPOSE_A, p.transpose_b = TRANSPOSE_B, p.from_registers = fragment != nullptr;
    p.a = a, p.b = b, p.accumulate = accumulate;
    emulation::IssueProduct(p, d, fragment);
  }
};

}  // namespace ptx
}  // namespace flashinfer
