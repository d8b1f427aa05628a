# SPDX-License-Identifier: Apache-2.0
"""Vectors of signed bytes: code of a quantised kernel compiles and computes correct values."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAM = r"""
#include <flashinfer/vec_dtypes.cuh>
#include <cstdio>
using namespace flashinfer;
static_assert(sizeof(vec_t<int8_t, 4>) == 4 && alignof(vec_t<int8_t, 16>) == 16);
static_assert(std::is_same_v<vec_t<int8_t, 8>, Vec<int8_t, 8>>);
static_assert(std::is_trivially_default_constructible_v<Vec<int8_t, 4>>);

template <int N>
__device__ float Sum(const int8_t* p) {
  const vec_t<int8_t, N> v(p);
  float x[N], sum = 0;
  v.ToFloats(x);
  for (int i = 0; i < N; ++i) sum += x[i] * (v.Float(i) == ToFloat(v[i]) ? 1.f : 1000.f);
  return sum;
}

__global__ void Kernel(int8_t* p, float* out) {
  Vec<int8_t, 4> values{1, -2, 3, -128}, copy(make_char4(1, -2, 3, -128));
  copy.Store(p);
  const float4 floats = Vec<int8_t, 4>::Load(p);
  const Vec<int8_t, 4> from_word(*reinterpret_cast<const uint32_t*>(&values));
  out[0] = floats.x + floats.y + floats.z + floats.w;         // -126
  out[1] = from_word[3] == values.data[3] ? 1.f : 0.f;        // 1
  const float large[4] = {1000.f, -1000.f, 2.5f, -3.5f};
  RoundTo<int8_t, 4>(large).Store(p + 4);                     // 127, -128, 2, -4
  Vec<int8_t, 8>::Zero().Store(p + 8);
  out[2] = Sum<16>(p);                                        // -126 - 3 + 0
  out[3] = Sum<8>(p) + Sum<4>(p) + Sum<2>(p) + Sum<1>(p);     // -129 - 126 - 1 + 1
}

int main() {
  int8_t* p;
  float *out, host[4];
  cudaMalloc(&p, 16);
  cudaMalloc(&out, sizeof(host));
  Kernel<<<1, 1>>>(p, out);
  cudaMemcpy(host, out, sizeof(host), cudaMemcpyDeviceToHost);
  const Vec<int8_t, 4> on_host{5, 6, 7, 8};
  std::printf("%g %g %g %g %g\n", host[0], host[1], host[2], host[3], float4(on_host).w);
}
"""


@pytest.mark.parametrize("arch", ["75", "90a"])
def test_vectors_of_int8(nvcc, arch, tmp_path):
    (tmp_path / "int8.cu").write_text(PROGRAM)
    target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = [nvcc, "-std=c++17", "-Werror=all-warnings", target, "-I", ROOT / "include", tmp_path / "int8.cu"]
    done = subprocess.run([*map(str, command), "-o", str(tmp_path / "int8")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if arch == "90a" and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        done = subprocess.run([tmp_path / "int8"], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["-126", "1", "-129", "-255", "8"]
