// SPDX-License-Identifier: Apache-2.0
// One token of the gated delta rule on states [sequence, value head, K, V] with V fastest, fp32. Formulas: rules.h;
// parameters: step.h, where a "row" of States is a key channel. Defined in k_major.cuh (CUDA), cpu/k_major.h (CPU).
//   test  pytest tests/recurrent      bench  python benchmarks/bench_recurrent.py
#pragma once
#include "step.h"

namespace flashinfer {
namespace recurrent {

template <typename T>
Status KMajorStep(const StepParams& params, Stream stream);

}  // namespace recurrent
}  // namespace flashinfer
