# SPDX-License-Identifier: Apache-2.0
"""Dense products against the references of their templates, called as engines call them."""

from __future__ import annotations

import importlib

import pytest
import torch

import flashinfer
from flashinfer import gemm
from flashinfer.autotuner import AutoTuner, autotune
from flashinfer.gemm import tuning
from flashinfer.trace.templates import gemm as templates

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: Sums of up to 1000 products of normal numbers, in another order; then one rounding to 8 bits of mantissa.
CLOSE = {"rtol": 2**-7, "atol": 1e-3}
EXACT_FP32 = {"rtol": 1e-5, "atol": 1e-3}


def bf16(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device).bfloat16()


def poisoned(*shape: int, dtype: torch.dtype = BF16, device: str) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def weights(layout: str, *shape: int, device: str) -> torch.Tensor:
    """Return ``(.., k, n)``: column-major, row-major, or columns of a wider buffer."""
    *batch, k, n = shape
    if layout == "column":
        return bf16(*batch, n, k, device=device).mT
    return bf16(*batch, k, n + (3 if layout == "wide" else 0), device=device)[..., :n]


@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    "m, n, k, layout", [(1, 16, 64, "column"), (7, 48, 264, "row"), (65, 40, 131, "wide"), (129, 64, 128, "column")]
)
def test_mm_bf16(device, m, n, k, layout, out_dtype):
    a, b, bias = bf16(m, k, device=device), weights(layout, k, n, device=device), bf16(n, device=device)
    close = EXACT_FP32 if out_dtype is FP32 else CLOSE
    for given in (None, bias):
        expected = templates.mm_bf16_trace.reference(a, b, given, out_dtype)
        out = poisoned(m, n, dtype=out_dtype, device=device)
        assert flashinfer.mm_bf16(a, b, given, False, out, out_dtype, "cudnn") is out
        torch.testing.assert_close(out, expected, **close)
        fresh = flashinfer.mm_bf16(a, b, bias=given, pdl=True, out_dtype=out_dtype)
        torch.testing.assert_close(fresh, expected, **close)


@pytest.mark.parametrize("backend", ["cudnn", "cublaslt", "tinygemm", "cutile", "auto"])
def test_backends_of_mm_bf16(device, backend):
    for m, n in ((3, 32), (3, 36864), (130, 32)):  # on a Hopper GPU the rule takes our kernel for the second one
        a, b = bf16(m, 256, device=device), bf16(n, 256, device=device).T
        out = flashinfer.mm_bf16(a, b, backend=backend)
        torch.testing.assert_close(out, templates.mm_bf16_trace.reference(a, b), **CLOSE)


def test_bias_is_added_before_the_rounding(device):
    """Check 257 + 1 = 258: rounded to bf16 first, 257 is 256, and the sum is 256 again."""
    for m in (2, 70):
        a = torch.ones(m, 16, device=device, dtype=BF16)
        b = torch.zeros(16, 16, device=device, dtype=BF16)
        b[0], b[1] = 256.0, 1.0
        bias = torch.ones(16, device=device, dtype=BF16)
        assert (flashinfer.mm_bf16(a, b.T.contiguous().T, bias) == 258).all()


def test_out_with_strides(device):
    a, b = bf16(5, 64, device=device), bf16(24, 64, device=device).T
    wide = poisoned(5, 32, device=device)
    out = wide[:, :24]
    assert flashinfer.mm_bf16(a, b, out=out) is out
    torch.testing.assert_close(out, templates.mm_bf16_trace.reference(a, b), **CLOSE)
    assert wide[:, 24:].isnan().all()


@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    "batch, m, n, k, layout", [(1, 5, 16, 64, "column"), (3, 66, 24, 72, "row"), (9, 4, 16384, 64, "column")]
)
def test_bmm_bf16(device, batch, m, n, k, layout, out_dtype):
    a, b = bf16(batch, m, k, device=device), weights(layout, batch, k, n, device=device)
    expected = templates.bmm_bf16_trace.reference(a, b, out_dtype)
    close = EXACT_FP32 if out_dtype is FP32 else CLOSE
    for backend in ("cudnn", "cutile", "auto"):
        out = poisoned(batch, m, n, dtype=out_dtype, device=device)
        assert flashinfer.bmm_bf16(a, b, out, out_dtype, backend) is out
        torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(flashinfer.bmm_bf16(a, b, out_dtype=out_dtype), expected, **close)


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("batch, m, n, k", [(1, 1, 48, 64), (1, 67, 32, 144), (3, 5, 20, 36)])
def test_bmm_fp8(device, batch, m, n, k, dtypes):
    a = torch.randn(batch, m, k, device=device).to(dtypes[0])
    b = torch.randn(batch, n, k, device=device).to(dtypes[1]).mT
    a_scale, b_scale = torch.full((), 0.5, device=device), torch.full((1,), 0.75, device=device)
    for dtype in (BF16, FP16):
        expected = templates.bmm_fp8_trace.reference(a, b, a_scale, b_scale, dtype)
        out = poisoned(batch, m, n, dtype=dtype, device=device)
        assert flashinfer.bmm_fp8(a, b, a_scale, b_scale, dtype, out, "cublas") is out
        torch.testing.assert_close(out, expected, **CLOSE)
        for backend in ("cudnn", "auto"):
            fresh = flashinfer.bmm_fp8(a, b, a_scale, b_scale, dtype, None, backend)
            torch.testing.assert_close(fresh, expected, **CLOSE)


@pytest.mark.parametrize("n", [64, 40960])
def test_bmm_fp8_of_few_and_many_weights(device, n):
    """Check both sides of the rule for few rows, with integers whose sums are exact in 13 bits too."""
    a = torch.randint(-2, 3, (1, 3, 256), device=device).float().to(E4M3)
    b = torch.randint(-2, 3, (1, n, 256), device=device).float().to(E4M3).mT
    half, two = torch.full((), 0.5, device=device), torch.full((1,), 2.0, device=device)
    expected = (a.double() @ b.double()).to(BF16)
    for backend in ("cublas", "cudnn", "auto"):
        assert flashinfer.bmm_fp8(a, b, half, two, BF16, backend=backend).equal(expected)


def test_bmm_fp8_reads_the_scales_when_it_runs(device):
    """Check that a scale that changes after a call affects the next one: nothing is kept on the host."""
    a, b = torch.ones(1, 2, 32, device=device).to(E4M3), torch.ones(1, 16, 32, device=device).to(E4M3).mT
    one, scale = torch.ones(1, device=device), torch.ones(1, device=device)
    for value in (1.0, 4.0):
        scale.fill_(value)
        assert (flashinfer.bmm_fp8(a, b, one, scale, BF16) == 32 * value).all()


@pytest.mark.parametrize("m, n, k", [(1, 32, 2880), (8, 128, 360), (70, 16, 256)])
def test_tinygemm_bf16(device, m, n, k):
    x, w, bias = bf16(m, k, device=device), bf16(n, k, device=device), bf16(n, device=device)
    for given in (None, bias):
        out = poisoned(m, n, device=device)
        assert gemm.tinygemm_bf16(x, w, out, given, use_pdl=True) is None
        torch.testing.assert_close(out, templates.tinygemm_bf16_trace.reference(x, w, given), **CLOSE)


def dense(a, b, bias, x8, w8, scale):
    y = flashinfer.mm_bf16(a, b, bias) + flashinfer.mm_bf16(a, b, backend="auto")
    z = flashinfer.bmm_bf16(a[None], b[None], out_dtype=FP32)
    tiny = torch.empty_like(y)
    gemm.tinygemm_bf16(a, b.T, tiny, bias)
    return y, z, tiny, flashinfer.bmm_fp8(x8, w8, scale, scale, BF16) * 2


def test_torch_compile(device):
    a, b, bias = bf16(3, 64, device=device), bf16(32, 64, device=device).T, bf16(32, device=device)
    x8, w8 = a[None].to(E4M3), b.T[None].to(E4M3).mT
    arguments = (a, b, bias, x8, w8, torch.full((1,), 0.5, device=device))
    compiled = torch.compile(dense, fullgraph=True)
    for actual, expected in zip(compiled(*arguments), dense(*arguments), strict=True):
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)


def test_rows_and_features_may_be_missing(device):
    assert flashinfer.mm_bf16(bf16(0, 64, device=device), bf16(16, 64, device=device).T).shape == (0, 16)
    a8, b8 = torch.empty(1, 0, 32, device=device).to(E4M3), torch.empty(1, 16, 32, device=device).to(E4M3).mT
    one = torch.ones((), device=device)
    assert flashinfer.bmm_fp8(a8, b8, one, one, BF16).shape == (1, 0, 16)


# The tuner.


def test_tuner_measures_both_runners(device):
    a, b, out = bf16(5, 64, device=device), bf16(16, 64, device=device).T, poisoned(5, 16, device=device)
    tuner = AutoTuner.get()
    tuner.clear_cache()
    runners = [tuning.OwnBf16Runner(), tuning.CublasLtBf16Runner()]
    with autotune(tuning_buckets=(4, 8)):
        tuning.choose_bf16([a, b, None, False, out, None], runners)
    torch.testing.assert_close(out, templates.mm_bf16_trace.reference(a, b), **CLOSE)
    assert {key.custom_op for key in tuner.profiling_cache} == {"bf16_gemm"}
    tuner.clear_cache()
    with autotune(tuning_buckets=(1, 4)):
        flashinfer.mm_bf16(a, b, backend="auto")
        one, a8, b8 = torch.ones((), device=device), a[None].to(E4M3), b.T[None].to(E4M3).mT
        flashinfer.bmm_fp8(a8, b8, one, one, BF16, backend="auto")
    assert {key.custom_op for key in tuner.profiling_cache} == {"bf16_gemm", "fp8_gemm"}
    tuner.clear_cache()


def test_cublaslt_runner(device, monkeypatch):
    """Check the interface that published tests use: algorithms of a call, and an error where there is none."""
    runner = gemm.gemm_base.get_mm_bf16_cublaslt_module().cublaslt_bf16_gemm_runner()
    a, b, out = bf16(5, 64, device=device), bf16(16, 64, device=device).T, poisoned(5, 16, device=device)
    inputs = [a, b, None, False, out, torch.empty(32, dtype=torch.uint8, device=device)]
    buffer, count = runner._get_algos(inputs)
    assert buffer.dtype is torch.uint8 and not buffer.is_cuda and count >= 1
    torch.testing.assert_close(runner.forward(inputs), templates.mm_bf16_trace.reference(a, b), **CLOSE)
    monkeypatch.setattr(runner, "_get_algos", lambda inputs: (buffer, 0))
    with pytest.raises(RuntimeError, match="zero algorithms"):
        runner.forward(inputs)


# Names.


def test_published_names(device):
    assert isinstance(gemm.gemm_base.CUDNN_AVAILABLE, bool) and gemm.is_cuda_tile_available() in (False, True)
    module = importlib.import_module("flashinfer.gemm.kernels.cutile.bmm_bf16_cutile")
    a, b = bf16(2, 3, 16, device=device), bf16(2, 8, 16, device=device).mT
    torch.testing.assert_close(module.bmm_bf16_cutile(a, b), templates.bmm_bf16_trace.reference(a, b), **CLOSE)
    assert module.make_bmm_bf16_tune_cache() == {}
    for name in ("mm_bf16", "bmm_bf16", "bmm_fp8", "fp8_blockscale_gemm_sm90"):
        assert getattr(gemm.gemm_base, name) is getattr(gemm, name)
    assert flashinfer.mm_bf16.is_backend_supported("cublaslt", 90) and flashinfer.bmm_fp8.has_backend("cudnn")
    assert not flashinfer.bmm_fp8.is_backend_supported("cutlass", 90)
    for op in (flashinfer.mm_bf16, flashinfer.bmm_bf16, flashinfer.bmm_fp8, gemm.tinygemm_bf16):
        assert op.is_compute_capability_supported(90)


def test_names_of_auto(device):
    """Check the published candidates of "auto": cuDNN where its package is, cuBLASLt, the kernel for few rows."""
    cudnn = ["cudnn"] if gemm.gemm_base.CUDNN_AVAILABLE else []
    a, b, bias = bf16(3, 32, device=device), bf16(16, 32, device=device).T, bf16(16, device=device)
    flashinfer.mm_bf16(a, b, backend="auto")
    assert flashinfer.mm_bf16.suitable_auto_backends == [*cudnn, "cublaslt", "tinygemm"]
    flashinfer.mm_bf16(a, b, bias, backend="auto")
    assert flashinfer.mm_bf16.suitable_auto_backends == [*cudnn, "tinygemm"]
    flashinfer.mm_bf16(a, b, bias, out_dtype=FP32, backend="auto")
    assert flashinfer.mm_bf16.suitable_auto_backends == ["cudnn"]
    flashinfer.bmm_bf16(a[None], b[None], backend="auto")
    assert flashinfer.bmm_bf16.suitable_auto_backends == ["cudnn"]


def test_published_generators():
    """Check that the published names describe modules that exist under our names."""
    generators = flashinfer.jit.gemm
    sm90 = [generators.gen_gemm_sm90_module(), generators.gen_fp8_blockscale_gemm_sm90_module(use_fast_build=True)]
    assert [spec.name for spec in sm90] == ["gemm_sm90_bf16", "gemm_sm90_fp8_block"]
    assert flashinfer.jit.gen_tinygemm2_module().name == generators.gen_gemm_module().name == "gemm"
