// SPDX-License-Identifier: Apache-2.0
// shift on the CPU (formula and parameters: shift.h). Chunks of elements over threads; vectors within a chunk.
//   test  pytest tests/shift
#pragma once
#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/vec.h"
#include "shift.h"

namespace flashinfer {

template <typename T>
Status Shift(const ShiftParams<T>& p, Stream) {
  using namespace cpu;
  constexpr int64_t CHUNK = 4096;
  ParallelFor((p.size + CHUNK - 1) / CHUNK, CHUNK, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * CHUNK, last = std::min(end * CHUNK, p.size);
    ForEachVec(last - first, [&](int64_t i, auto lanes) {
      Store(p.output + first + i, Load(p.input + first + i, lanes) + p.amount, lanes);
    });
  });
  return 0;
}

}  // namespace flashinfer
