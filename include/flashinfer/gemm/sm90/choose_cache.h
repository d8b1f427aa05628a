// SPDX-License-Identifier: Apache-2.0
// Choices of tiles that a thread has made before. The model of all tiles takes 0.5 us, a look-up 0.02.
#pragma once
#include "choose.h"

namespace flashinfer {
namespace gemm {

inline bool IsSameShape(const GemmShape& x, const GemmShape& y) {
  return x.rows == y.rows && x.n == y.n && x.k == y.k && x.batch == y.batch && x.grouping == y.grouping &&
         x.element_bytes == y.element_bytes && x.is_block == y.is_block && x.needs_swapped == y.needs_swapped &&
         x.is_gated == y.is_gated;
}

/// Return choose(), which depends on `x` and `sms` alone in all calls of a module with this type of `choose`.
template <typename Choose>
GemmConfig FindChoice(const GemmShape& x, int sms, const Choose& choose) {
  struct Entry {
    GemmShape shape;
    int sms;  // 0: not in use
    GemmConfig choice;
  };
  constexpr uint64_t ENTRIES = 128;
  static thread_local Entry entries[ENTRIES];
  uint64_t hash = uint64_t(x.rows);
  for (const int64_t size : {x.n, x.k, x.batch}) hash = hash * 31 + uint64_t(size);
  Entry& entry = entries[(hash * 0x9E3779B97F4A7C15u) >> 57];
  if (entry.sms != sms || !IsSameShape(entry.shape, x)) {
    entry.choice = choose();
    entry.shape = x, entry.sms = sms;
  }
  return entry.choice;
}

}  // namespace gemm
}  // namespace flashinfer
