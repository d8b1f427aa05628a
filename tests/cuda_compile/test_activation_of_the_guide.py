# SPDX-License-Identifier: Apache-2.0
"""The guide's activation case: a header of one's own compiles against include/ alone, without Torch or TVM-FFI."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

HEADER = """
#pragma once
#include <flashinfer/vec_dtypes.cuh>

namespace flashinfer {
template <typename T, int VEC>
__global__ void SwiGLUKernel(T* out, const T* x, const T* gate, int64_t n) {
  const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * VEC;
  if (i >= n) return;
  auto a = Vec<T, VEC>::Load(x + i), b = Vec<T, VEC>::Load(gate + i);
#pragma unroll
  for (int j = 0; j < VEC; ++j) a[j] = T(a.Float(j) * b.Float(j) / (1.f + __expf(-b.Float(j))));
  a.Store(out + i);
}
template <typename T>
cudaError_t ApplySwiGLU(T* out, const T* x, const T* gate, int64_t n, cudaStream_t stream) {
  SwiGLUKernel<T, 4><<<uint32_t((n / 4 + 255) / 256), 256, 0, stream>>>(out, x, gate, n);
  return cudaGetLastError();
}
}  // namespace flashinfer
"""
SOURCE = """
#include "my_activation.cuh"
template cudaError_t flashinfer::ApplySwiGLU<__half>(__half*, const __half*, const __half*, int64_t, cudaStream_t);
template cudaError_t flashinfer::ApplySwiGLU<float>(float*, const float*, const float*, int64_t, cudaStream_t);
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_header_compiles_against_include_alone(tmp_path):
    (tmp_path / "my_activation.cuh").write_text(HEADER)
    (tmp_path / "my_activation.cu").write_text(SOURCE)
    target = ("-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-cubin")
    includes = (f"-I{ROOT / 'include'}", f"-I{tmp_path}")
    command = ["nvcc", *target, *includes, "-o", "out.cubin", "my_activation.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.cubin").stat().st_size > 1000
