# SPDX-License-Identifier: Apache-2.0
"""``flashinfer.scale``, the operator of the tutorial: values, buffers, errors, module names, graphs, torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer
from flashinfer import aot
from flashinfer.jit.scale import gen_scale_module
from flashinfer.scale import _check_scale, get_scale_module
from flashinfer.testing import assert_close
from flashinfer.trace.templates.scale import scale_trace

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)


# ------------------------------------------------------------------------------------------------ without a GPU


def test_cpu_tensor_is_refused():
    with pytest.raises(ValueError, match="CUDA") as caught:
        flashinfer.scale(torch.randn(128), 2.0)
    assert isinstance(caught.value, AssertionError)
    assert "scale: input must be on a CUDA device, got cpu" in str(caught.value)


@pytest.mark.parametrize(
    "input, out, text",
    [
        (torch.ones(4), torch.ones(5), r"out must have shape \(4,\), got \(5,\)"),
        (torch.ones(2, 2), torch.ones(4), r"out must have shape \(2, 2\), got \(4,\)"),
        (torch.ones(4), torch.ones(4).half(), "out must have dtype torch.float32, got torch.float16"),
        (torch.ones(4), torch.ones(4, device="meta"), "out must be on cpu, got meta"),
        (torch.ones(4).double(), None, "input must have dtype float16, bfloat16 or float32, got torch.float64"),
        (torch.ones(4).int(), None, "input must have dtype float16, bfloat16 or float32, got torch.int32"),
    ],
)
def test_mismatches(input, out, text):
    with pytest.raises(ValueError, match=f"scale: {text}"):
        _check_scale(input, 2.0, out)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")


@pytest.mark.parametrize("name", NAMES)
def test_module_name(hopper, name):
    assert gen_scale_module(name, name).name == f"scale_dtype_in_{name}_dtype_out_{name}"


def test_modules_ahead_of_time(hopper):
    assert [spec.name for spec in aot.gen_scale_modules()] == [
        f"scale_dtype_in_{name}_dtype_out_{name}" for name in ("float16", "bfloat16", "float32")
    ]
    assert list(aot.gen_scale_modules("cpu")) == []


@pytest.mark.parametrize("types", [("float16", "float32"), ("float64", "float64"), ("torch.float16", "float16")])
def test_module_of_other_types(hopper, types):
    with pytest.raises(ValueError, match=r"scale: dtypes must be one of float16, bfloat16, float32, twice, got "):
        gen_scale_module(*types)


def test_tracing_runs_nothing():
    """Check that the op neither compiles nor launches under torch.compile's fake tensors."""
    with FakeTensorMode():
        x = torch.empty(8)
        torch.ops.flashinfer.scale(torch.empty_like(x), x, 2.0)


@dtypes
def test_reference(dtype):
    x = torch.randn(64).to(dtype)
    assert_close(scale_trace.reference(x, 3.14), (x.float() * 3.14).to(dtype), rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------ on a GPU


@needs_gpu
@pytest.mark.parametrize("size", [128, 1024, 4096])
@dtypes
def test_scale_correctness(dtype, size):
    x = torch.randn(size, device="cuda").to(dtype)
    assert_close(flashinfer.scale(x, 3.14), scale_trace.reference(x, 3.14))


@needs_gpu
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 13, 17), (3, 0, 5)], ids=str)
@dtypes
def test_shapes(dtype, shape):
    x = torch.randn(shape, device="cuda").to(dtype)
    y = flashinfer.scale(x, -0.5)
    assert y.shape == x.shape
    assert_close(y, scale_trace.reference(x, -0.5))


@needs_gpu
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_unaligned_views(offset):
    """Check views that do not start at a 16-byte vector."""
    x = torch.randn(1000, device="cuda", dtype=torch.float16)[offset:]
    assert_close(flashinfer.scale(x, 2.5), scale_trace.reference(x, 2.5))


@needs_gpu
@pytest.mark.parametrize("factor", [0.0, 1, float("inf"), float("nan"), 1e-7])
def test_factors(factor):
    x = torch.randn(100, device="cuda")
    assert_close(flashinfer.scale(x, factor), scale_trace.reference(x, factor), equal_nan=True)


@needs_gpu
@dtypes
def test_out(dtype):
    x = torch.randn(1024, device="cuda").to(dtype)
    out = torch.empty_like(x)
    expected = scale_trace.reference(x, 2.0)
    assert flashinfer.scale(x, 2.0, out=out) is out
    assert_close(out, expected)
    assert flashinfer.scale(x, 2.0, out=x) is x  # in place
    assert_close(x, expected)


@needs_gpu
@pytest.mark.parametrize(
    "out",
    [lambda x: torch.empty(5, device="cuda"), lambda x: x.half(), lambda x: torch.empty(4)],
    ids=["shape", "dtype", "device"],
)
def test_wrong_out(out):
    x = torch.ones(4, device="cuda")
    with pytest.raises(ValueError, match="scale: out"):
        flashinfer.scale(x, 2.0, out=out(x))


@needs_gpu
def test_unsupported_dtype():
    with pytest.raises(ValueError, match=r"must have dtype float16, bfloat16 or float32, got torch\.float64"):
        flashinfer.scale(torch.ones(4, device="cuda", dtype=torch.float64), 2.0)


@needs_gpu
def test_native_checks():
    """Check native validation: contiguity, which Python does not check, and the checks that ``skip_check`` skips."""
    x = torch.ones(4, 4, device="cuda")
    with pytest.raises(ValueError, match="input must be contiguous"):
        flashinfer.scale(x.t()[:, :2], 2.0)
    with pytest.raises(ValueError, match=r"scale: output must have shape \(4, 4\).*, got \(2, 4\)"):
        flashinfer.scale(x, 2.0, out=x[:2], skip_check=True)


@needs_gpu
def test_accessor_is_cached():
    assert get_scale_module("float16", "float16") is get_scale_module("float16", "float16")


@needs_gpu
def test_callers_stream():
    """Check that the kernel runs on the caller's stream: a long wait on a side stream must delay it."""
    stream = torch.cuda.Stream()
    x, y = torch.zeros(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
    flashinfer.scale(x, 1.0, out=y)  # compile and load before the race
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        flashinfer.scale(x, 2.0, out=y)
    stream.synchronize()
    assert y.eq(6.0).all()


@needs_gpu
def test_cuda_graph():
    x = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    out = torch.zeros_like(x)
    flashinfer.scale(x, 2.0, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashinfer.scale(x, 2.0, out=out)
    x.copy_(torch.randn(1024))
    graph.replay()
    assert_close(out, scale_trace.reference(x, 2.0))


@needs_gpu
@pytest.mark.parametrize("form", ["allocates", "in place"])
def test_torch_compile(form):
    def model(x):
        x = x + 1
        return flashinfer.scale(x, 2.0, out=x) * 3 if form == "in place" else flashinfer.scale(x, 2.0) * 3

    x = torch.randn(64, device="cuda", dtype=torch.float16)
    assert_close(torch.compile(model, fullgraph=True)(x), model(x))


@needs_gpu
def test_without_torch_tensors():
    """Call with any DLPack tensor."""
    import tvm_ffi

    x = torch.ones(8, device="cuda", dtype=torch.float16)
    y = torch.empty_like(x)
    get_scale_module("float16", "float16").run(tvm_ffi.from_dlpack(x), tvm_ffi.from_dlpack(y), 2.0)
    assert y.eq(2).all()
