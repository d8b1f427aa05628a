# SPDX-License-Identifier: Apache-2.0
"""The operator of the tutorial (examples/scale), as a newcomer types it, builds in a copy of the tree and runs.

What must hold: a launcher that does not include the helper header, a binding that includes the launcher while both are
listed as sources, ``TensorView::data_ptr<T>()``, and both generations of the tutorial's binding.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch

from flashinfer.jit import build_jit_specs, gen_jit_spec
from flashinfer.jit import env as jit_env

from .options import COMPILES

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "scale"

# The tutorial's first edition: the kernel computes in T, and the binding has a launcher of its own that takes a double.
OLD_KERNEL = """
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
namespace flashinfer {
template <typename T>
__global__ void ScaleKernel(const T* input, T* output, T factor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) output[i] = input[i] * factor;
}
template <typename T>
cudaError_t ScaleLauncher(const T* input, T* output, T factor, int n, cudaStream_t stream = nullptr) {
  ScaleKernel<T><<<(n + 255) / 256, 256, 0, stream>>>(input, output, factor, n);
  return cudaGetLastError();
}
}  // namespace flashinfer
"""
OLD_LAUNCHER = """
#include "flashinfer/old_scale.cuh"
using namespace flashinfer;

void old_scale_launcher(TensorView input, TensorView output, float factor) {
  CHECK_INPUT(input);
  CHECK_INPUT(output);
  TVM_FFI_ICHECK_EQ(input.dtype(), output.dtype());
  int n = input.numel();
  auto stream = get_stream(input.device());
  DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP32_FP16(input.dtype(), DType, [&] {
    cudaError_t status = ScaleLauncher<DType>(input.data_ptr<DType>(), output.data_ptr<DType>(),
                                              static_cast<DType>(factor), n, stream);
    TVM_FFI_ICHECK(status == cudaSuccess) << "Failed to run: " << cudaGetErrorString(status);
    return true;
  });
}
"""
OLD_BINDING = """
#include "old_scale.cu"
#include "tvm_ffi_utils.h"

void old_scale(TensorView input, TensorView output, double factor) {
  old_scale_launcher(input, output, static_cast<float>(factor));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, old_scale);
"""


@pytest.fixture(scope="module")
def tutorial(nvcc, tmp_path_factory):
    """Build both editions for Hopper in one graph; return the API module of the example, its spec, the old spec."""
    root = tmp_path_factory.mktemp("tutorial")
    for name, directory in (("csrc", jit_env.FLASHINFER_CSRC_DIR), ("include", jit_env.FLASHINFER_INCLUDE_DIR)):
        shutil.copytree(directory, root / name)
    headers, csrc = root / "include" / "flashinfer", root / "csrc"
    shutil.copy(EXAMPLE / "scale.cuh", headers)
    shutil.copy(EXAMPLE / "scale.cu", csrc)
    shutil.copy(EXAMPLE / "scale_jit_binding.cu", csrc)
    (headers / "old_scale.cuh").write_text(OLD_KERNEL)
    (csrc / "old_scale.cu").write_text(OLD_LAUNCHER)
    (csrc / "old_scale_jit_binding.cu").write_text(OLD_BINDING)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(jit_env), "FLASHINFER_CSRC_DIR", csrc)
        patch.setitem(vars(jit_env), "FLASHINFER_INCLUDE_DIR", root / "include")
        patch.setitem(vars(jit_env), "FLASHINFER_JIT_DIR", root / "cached_ops")
        patch.setitem(vars(jit_env), "FLASHINFER_GEN_SRC_DIR", root / "generated")
        patch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
        patch.setenv("FLASHINFER_EXTRA_CFLAGS", "-O0")  # no figure depends on the speed of the host code
        patch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", COMPILES)
        patch.syspath_prepend(str(EXAMPLE))
        patch.setattr(sys, "dont_write_bytecode", True)
        api, generator = (importlib.import_module(name) for name in ("scale", "jit_scale"))
        spec = generator.gen_scale_module("float16", "float16")
        old = gen_jit_spec("old_scale", [csrc / "old_scale.cu", csrc / "old_scale_jit_binding.cu"])
        build_jit_specs([spec, old])
        yield api, spec, old
        for name in ("scale", "jit_scale"):
            del sys.modules[name]


def test_both_editions_build_and_load(tutorial):
    _, spec, old = tutorial
    assert spec.name == "scale_dtype_in_float16_dtype_out_float16"
    for made in (spec, old):
        assert made.is_fresh()
        assert callable(made.load().run)


def test_the_example_was_built(tutorial):
    """Check that the example was built, not the package's own scale, which has the same name."""
    _, spec, _ = tutorial
    assert [source.name for source in spec.sources] == ["scale.cu", "scale_jit_binding.cu"]
    assert len(spec.get_object_paths()) == 1
    copied = jit_env.FLASHINFER_GEN_SRC_DIR / spec.name / "scale.cu"
    assert copied.read_text() == (EXAMPLE / "scale.cu").read_text()
    assert '"{include}/flashinfer/scale.cuh"' in spec.jit_library_path.with_suffix(".manifest.json").read_text()


@pytest.mark.parametrize("which", [1, 2], ids=["example", "first edition"])
def test_native_checks(tutorial, which):
    """Check errors that are raised before any launch, on a machine without GPU too."""
    run = tutorial[which].load().run
    x = torch.ones(4, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"input must be a CUDA tensor, got one on cpu"):
        run(x, x, 2.0)
    with pytest.raises(TypeError):
        run(x, x, "two")


def test_python_checks(tutorial):
    api, _, _ = tutorial
    with pytest.raises(ValueError, match="CUDA") as caught:
        api.scale(torch.ones(4), 2.0)
    assert isinstance(caught.value, AssertionError)


def test_module_is_cached(tutorial):
    api, _, _ = tutorial
    assert api.get_scale_module("float16", "float16") is api.get_scale_module("float16", "float16")


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [0, 1, 1000, (3, 5, 7)], ids=str)
def test_values(tutorial, dtype, size):
    _, spec, _ = tutorial
    x = torch.randn(size, device="cuda").to(dtype)
    y = torch.empty_like(x)
    spec.load().run(x, y, 3.14)  # one module serves every dtype, though the module name in the tutorial mentions one
    torch.testing.assert_close(y, (x.float() * 3.14).to(dtype))


@on_hopper
def test_first_edition(tutorial):
    x = torch.randn(1000, device="cuda", dtype=torch.float16)
    y = torch.empty_like(x)
    tutorial[2].load().run(x, y, 3.14)
    torch.testing.assert_close(y, x * torch.tensor(3.14, dtype=torch.float16), rtol=1e-3, atol=1e-3)


@on_hopper
def test_api(tutorial):
    api, _, _ = tutorial
    x = torch.randn(128, device="cuda", dtype=torch.float16)
    out = torch.empty_like(x)
    assert api.scale(x, 0.5, out=out) is out
    torch.testing.assert_close(out, x * 0.5)
    with pytest.raises(ValueError, match="out has shape"):
        api.scale(x, 0.5, out=out[1:])
    with pytest.raises(ValueError, match="expected float16, bfloat16 or float32"):
        api.scale(x.double(), 0.5)


@on_hopper
def test_errors_on_the_gpu(tutorial):
    run = tutorial[1].load().run
    x = torch.randn(4, 4, device="cuda")
    with pytest.raises(ValueError, match="input must be contiguous"):
        run(x.t(), x, 1.0)
    with pytest.raises(RuntimeError, match=r"float32 vs\. float16"):
        run(x, x.half(), 1.0)
    with pytest.raises(ValueError, match="no kernel for float64"):
        run(x.double(), x.double(), 1.0)


@on_hopper
def test_callers_stream(tutorial):
    """Check that launches use the caller's stream: a capture records only launches on the capturing stream."""
    run = tutorial[1].load().run
    x, y = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x, y, 2.0)
    assert y.sum().item() == 0
    graph.replay()
    assert y.sum().item() == 128
