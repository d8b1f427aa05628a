// SPDX-License-Identifier: Apache-2.0
// Gated SiLU on the CPU without Python: out = silu(gate) * up, and a check of the result.
#include <cmath>
#include <cstdio>
#include <vector>

#include "flashinfer/activation_cpu.h"

constexpr int64_t ROWS = 5, COLUMNS = 300;

int main() {
  std::vector<float> gate(ROWS * COLUMNS), up(ROWS * COLUMNS), out(ROWS * COLUMNS);
  for (int64_t i = 0; i < ROWS * COLUMNS; ++i) {
    gate[i] = float(i * 37 % 101 - 50) / 16.f;
    up[i] = float(i * 53 % 89 - 44) / 16.f;
  }
  flashinfer::ActAndMulParams<float> params{};
  params.gate = gate.data();
  params.up = up.data();
  params.out = out.data();
  params.rows = ROWS;
  params.columns = params.gate_stride = params.up_stride = params.out_stride = COLUMNS;
  flashinfer::ActAndMul<flashinfer::Activation::kSilu, float>(params, {});

  double worst = 0.;
  for (int64_t i = 0; i < ROWS * COLUMNS; ++i) {
    worst = std::fmax(worst, std::fabs(gate[i] / (1. + std::exp(-double(gate[i]))) * up[i] - out[i]));
  }
  std::printf("largest error %.1e\n", worst);
  return worst < 1e-4 ? 0 : 1;
}
