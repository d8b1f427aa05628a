# SPDX-License-Identifier: Apache-2.0
"""Products of values with scales of blocks: the CPU form, what torch is called with, and the queries."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import gemm, quantization
from flashinfer._runtime.errors import BackendSupportedError
from flashinfer.gemm import block_scaled

M, N, K = 5, 24, 64
SIZES = {"mm_fp4": {"M": M, "N": N, "K": K // 2}, "mm_mxfp8": {"M": M, "N": N, "K": K}}


def made(api: str) -> dict[str, torch.Tensor]:
    return getattr(flashinfer, api).fi_init(**SIZES[api], device="cpu")


def test_fp4():
    """Check against values that e2m1_and_ufp8sf_scale_to_float gives back."""
    given, one = made("mm_fp4"), torch.ones(1)
    a = quantization.e2m1_and_ufp8sf_scale_to_float(given["a"], given["a_descale"], one, 16, 1)
    b = quantization.e2m1_and_ufp8sf_scale_to_float(given["b"].T.contiguous(), given["b_descale"], one, 16, 1)
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(M, N, dtype=dtype)
        assert flashinfer.mm_fp4(**given, out_dtype=dtype, out=out, backend="cutlass") is out
        torch.testing.assert_close(out, (a @ b.T * 0.125).to(dtype))


def test_mxfp8():
    """Check against values that mxfp8_dequantize_host gives back."""
    given = made("mm_mxfp8")
    a = quantization.mxfp8_dequantize_host(given["a"].view(torch.uint8), given["a_descale"])
    b = quantization.mxfp8_dequantize_host(given["b"].T.contiguous().view(torch.uint8), given["b_descale"])
    torch.testing.assert_close(flashinfer.mm_mxfp8(**given), (a @ b.T).bfloat16())


@pytest.mark.parametrize("api", ["mm_fp4", "mm_mxfp8"])
def test_queries(api):
    op = getattr(gemm, api)
    assert op.is_compute_capability_supported(100) and not op.is_compute_capability_supported(90)
    assert op.is_backend_supported("cudnn") and not op.is_backend_supported("cudnn", 80)
    assert op.is_backend_supported("cudnn", 120) and not op.is_backend_supported("cublas", 120)
    assert op.has_backend("cutlass") and not op.has_backend("fa2") and op.has_backend_choices() is True
    assert op.suitable_auto_backends == [] and callable(op.fi_trace)


class OnDevice(torch.Tensor):
    """CPU values that say they are on a GPU."""

    is_cpu = False


def pretend(monkeypatch, capability: tuple[int, int], given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    monkeypatch.setattr(block_scaled, "get_compute_capability", lambda device: capability)
    monkeypatch.setattr(block_scaled, "check_tensors", lambda op, **tensors: None)
    return {name: x.as_subclass(OnDevice) for name, x in given.items()}


@pytest.mark.parametrize("api", ["mm_fp4", "mm_mxfp8"])
def test_hopper_is_refused(monkeypatch, api):
    given = pretend(monkeypatch, (9, 0), made(api))
    for error in (BackendSupportedError, ValueError, RuntimeError):
        with pytest.raises(
            error, match=rf"{api}: needs a Blackwell GPU \(SM100 on\) or CPU tensors, got capability 9.0"
        ):
            getattr(flashinfer, api)(**given)


@pytest.mark.parametrize("api", ["mm_fp4", "mm_mxfp8"])
def test_what_torch_is_called_with_on_blackwell(monkeypatch, api):
    """Check types, orders and sizes by the rules of torch's product of scaled blocks; no GPU here can run it."""
    calls = []

    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype):
        calls.append((a, b, scale_a, scale_b))
        return torch.ones(M, N, dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    given = pretend(monkeypatch, (10, 0), made(api))
    out = getattr(flashinfer, api)(**given)
    assert out.dtype == torch.bfloat16 and (out == (0.125 if api == "mm_fp4" else 1)).all()
    a, b, scale_a, scale_b = calls[0]
    types = {"mm_fp4": (torch.float4_e2m1fn_x2, torch.float8_e4m3fn)}
    value, scale = types.get(api, (torch.float8_e4m3fn, torch.float8_e8m0fnu))
    assert a.dtype == b.dtype == value and scale_a.dtype == scale_b.dtype == scale
    assert a.is_contiguous() and b.stride(0) == 1  # row-major times column-major
    blocks = K // (16 if api == "mm_fp4" else 32)
    assert scale_a.numel() == scale_b.numel() == 128 * -(-blocks // 4) * 4
    with pytest.raises(ValueError, match="use_8x4_sf_layout must be False"):
        getattr(flashinfer, api)(**given, use_8x4_sf_layout=True)


BAD = [
    ("mm_fp4", {"block_size": 32}, "block_size must be 16, got 32"),
    ("mm_fp4", {"out_dtype": torch.int8}, "out_dtype must be bfloat16"),
    ("mm_fp4", {"backend": "fa2"}, "does not support backend 'fa2'"),
    ("mm_mxfp8", {"a": torch.zeros(M, K)}, "a and b must be float8_e4m3fn"),
    ("mm_mxfp8", {"a": torch.zeros(M, 32).to(torch.float8_e4m3fn)}, r"must have shapes \(m, k\) and \(k, n\)"),
    ("mm_mxfp8", {"a_descale": torch.zeros(3, dtype=torch.uint8)}, "a_descale must have a byte for each block"),
    ("mm_mxfp8", {"out": torch.zeros(1, 1)}, "out must be torch.bfloat16 with shape"),
]


@pytest.mark.parametrize("api, change, text", BAD)
def test_refused_calls(api, change, text):
    with pytest.raises((ValueError, BackendSupportedError), match=text):
        getattr(flashinfer, api)(**made(api) | change)
