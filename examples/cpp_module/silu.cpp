// SPDX-License-Identifier: Apache-2.0
// Loads a compiled CPU module of the activation family, calls silu_and_mul and checks the result. No Python, no torch.
#include <dlpack/dlpack.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <cmath>
#include <cstdio>
#include <vector>

constexpr int64_t ROWS = 3, COLUMNS = 64;

/// Describe a contiguous float32 matrix in main memory.
DLTensor Matrix(std::vector<float>& data, int64_t* shape, int64_t* strides) {
  DLTensor tensor{};
  tensor.data = data.data();
  tensor.device = {kDLCPU, 0};
  tensor.ndim = 2;
  tensor.dtype = {kDLFloat, 32, 1};
  tensor.shape = shape;
  tensor.strides = strides;
  return tensor;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::printf("usage: silu activation_cpu.so\n");
    return 2;
  }
  std::vector<float> x(ROWS * 2 * COLUMNS), y(ROWS * COLUMNS, 0.f);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(int(i * 37 % 101) - 50) / 16.f;
  int64_t x_shape[] = {ROWS, 2 * COLUMNS}, x_strides[] = {2 * COLUMNS, 1};
  int64_t y_shape[] = {ROWS, COLUMNS}, y_strides[] = {COLUMNS, 1};
  DLTensor input = Matrix(x, x_shape, x_strides), out = Matrix(y, y_shape, y_strides);

  try {
    const auto module = tvm::ffi::Module::LoadFromFile(argv[1]);
    const auto silu_and_mul = module->GetFunction("silu_and_mul").value();
    silu_and_mul(&out, &input, false);
  } catch (const std::exception& error) {
    std::printf("silu: %s\n", error.what());
    return 1;
  }

  double worst = 0.;
  for (int64_t row = 0; row < ROWS; ++row) {
    for (int64_t i = 0; i < COLUMNS; ++i) {
      const double gate = x[row * 2 * COLUMNS + i], up = x[row * 2 * COLUMNS + COLUMNS + i];
      worst = std::fmax(worst, std::fabs(gate / (1. + std::exp(-gate)) * up - y[row * COLUMNS + i]));
    }
  }
  std::printf("largest error %.1e\n", worst);
  return worst < 1e-4 ? 0 : 1;
}
