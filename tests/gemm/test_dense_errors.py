# SPDX-License-Identifier: Apache-2.0
"""Errors of the dense products: ValueError with the published words, the op and both values."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import gemm
from flashinfer._runtime.errors import BackendSupportedError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
M, N, K = 3, 32, 64


def ones(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.ones(shape, device=device).to(dtype)


def refused(function, text: str, *args, **kwargs) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        function(*args, **kwargs)
    assert str(caught.value).startswith(f"{function.__name__}: ") and "got" in str(caught.value)


MM = {
    "a": ({"a": (FP16, M, K)}, "unsupported dtype"),
    "b": ({"b": (FP32, K, N)}, "unsupported dtype"),
    "bias": ({"bias": (FP32, N)}, "unsupported dtype.*bias must be bfloat16"),
    "bias shape": ({"bias": (BF16, N + 1)}, r"bias must be \(32,\)"),
    "rank": ({"a": (BF16, 1, M, K)}, "must be 2D"),
    "k": ({"b": (BF16, K + 8, N)}, "K dimension mismatch"),
    "out shape": ({"out": (BF16, M, N + 1)}, "Output shape mismatch"),
    "out dtype": ({"out": (FP16, M, N)}, "Output dtype mismatch"),
    "out_dtype": ({"out_dtype": torch.float64}, "Unsupported output dtype"),
    "cublaslt bias": ({"bias": (BF16, N), "backend": "cublaslt"}, "not support bias"),
    "cublaslt pdl": ({"pdl": True, "backend": "cublaslt"}, "not support pdl"),
    "cutile bias": ({"bias": (BF16, N), "backend": "cutile"}, "ignores `bias`"),
    "cutile pdl": ({"pdl": True, "backend": "cutile"}, "ignores `pdl`"),
    "tinygemm dtype": ({"out_dtype": FP32, "backend": "tinygemm"}, "requires bfloat16"),
    "tinygemm b": ({"b": (BF16, K, N), "backend": "tinygemm"}, "b.T must be contiguous"),
}


@pytest.mark.parametrize("changes, text", MM.values(), ids=MM)
def test_mm_bf16(device, changes, text):
    good = {"a": ones(device, BF16, M, K), "b": ones(device, BF16, N, K).T}
    flashinfer.mm_bf16(**good)
    bad = {name: ones(device, *value) if isinstance(value, tuple) else value for name, value in changes.items()}
    refused(flashinfer.mm_bf16, text, **good | bad)


def test_layouts_of_tinygemm(device):
    b, wide = ones(device, BF16, N, K).T, ones(device, BF16, M, K + 8)
    refused(flashinfer.mm_bf16, "a must be contiguous", wide[:, :K], b, backend="tinygemm")
    refused(flashinfer.mm_bf16, "multiple of 16", wide[:, :K].contiguous(), b[:, :24], backend="tinygemm")
    refused(
        flashinfer.mm_bf16, "out must be contiguous", wide[:, :K].contiguous(), b, out=wide[:, :N], backend="tinygemm"
    )


BMM = {
    "A": ({"A": (FP16, 2, M, K)}, "unsupported dtype"),
    "rank": ({"A": (BF16, M, K)}, "must be 3D"),
    "batch": ({"A": (BF16, 3, M, K)}, "batches of one size"),
    "k": ({"A": (BF16, 2, M, K + 8)}, "K dimension mismatch"),
    "out shape": ({"out": (BF16, 2, M, N + 1)}, "Output shape mismatch"),
    "out dtype": ({"out": (FP32, 2, M, N)}, "Output dtype mismatch"),
    "out_dtype": ({"out_dtype": E4M3}, "Unsupported output dtype"),
}


@pytest.mark.parametrize("changes, text", BMM.values(), ids=BMM)
def test_bmm_bf16(device, changes, text):
    good = {"A": ones(device, BF16, 2, M, K), "B": ones(device, BF16, 2, N, K).mT}
    bad = {name: ones(device, *value) if isinstance(value, tuple) else value for name, value in changes.items()}
    refused(flashinfer.bmm_bf16, text, **good | bad)


FP8 = {
    "A": ({"A": (BF16, 2, M, K)}, "unsupported dtype"),
    "both e5m2": ({"A": (E5M2, 2, M, K), "B": (E5M2, 2, K, N)}, "unsupported dtype.*must be float8_e4m3fn"),
    "rank": ({"A": (E4M3, M, K)}, "must be 3D"),
    "batch": ({"A": (E4M3, 3, M, K)}, "batches of one size"),
    "k": ({"A": (E4M3, 2, M, K + 16)}, "K dimension mismatch"),
    "A_scale": ({"A_scale": (FP32, 2)}, "A_scale must be float32 with one element"),
    "B_scale": ({"B_scale": (FP16, 1)}, "B_scale must be float32 with one element"),
    "dtype": ({"dtype": FP32}, "Unsupported output dtype"),
    "out shape": ({"out": (BF16, 2, M, N + 1)}, "Output shape mismatch"),
    "out dtype": ({"out": (FP16, 2, M, N)}, "Output dtype mismatch"),
}


@pytest.mark.parametrize("changes, text", FP8.values(), ids=FP8)
def test_bmm_fp8(device, changes, text):
    one = torch.ones((), device=device)
    good = {"A": ones(device, E4M3, 2, M, K), "B": ones(device, E4M3, 2, N, K).mT}
    good |= {"A_scale": one, "B_scale": one, "dtype": BF16}
    flashinfer.bmm_fp8(**good)
    bad = {name: ones(device, *value) if isinstance(value, tuple) else value for name, value in changes.items()}
    refused(flashinfer.bmm_fp8, text, **good | bad)


TINY = {
    "input": ({"input": (FP16, M, K)}, "unsupported dtype.*input must be bfloat16"),
    "bias": ({"bias": (FP32, N)}, "unsupported dtype.*bias must be bfloat16"),
    "rank": ({"input": (BF16, 1, M, K)}, "input must be 2D"),
    "bias rank": ({"bias": (BF16, 1, N)}, "bias must be 1D"),
    "k": ({"weight": (BF16, N, K + 8)}, r"weight.shape\[1\] must be"),
    "n": ({"weight": (BF16, 24, K), "out": (BF16, M, 24)}, "multiple of 16"),
    "out": ({"out": (BF16, M, N + 16)}, "out must be"),
    "bias shape": ({"bias": (BF16, N + 1)}, "bias must be"),
}


@pytest.mark.parametrize("changes, text", TINY.values(), ids=TINY)
def test_tinygemm_bf16(device, changes, text):
    good = {"input": ones(device, BF16, M, K), "weight": ones(device, BF16, N, K), "out": ones(device, BF16, M, N)}
    bad = {name: ones(device, *value) for name, value in changes.items()}
    refused(gemm.tinygemm_bf16, text, **good | bad)


def test_tinygemm_wants_contiguous_tensors(device):
    x, w, out = ones(device, BF16, M, K), ones(device, BF16, N, K), ones(device, BF16, M, N)
    for name, given in {
        "input": (x.T.contiguous().T, w, out),
        "weight": (x, w.T.contiguous().T, out),
        "out": (x, w, out.T.contiguous().T),
    }.items():
        refused(gemm.tinygemm_bf16, f"{name} must be contiguous", *given)


def test_out_on_another_device():
    a, b = ones("cpu", BF16, M, K), ones("cpu", BF16, N, K).T
    out = torch.empty(M, N, dtype=BF16, device="meta")
    refused(flashinfer.mm_bf16, "Output device mismatch", a, b, out=out)
    refused(flashinfer.bmm_bf16, "Output device mismatch", a[None], b[None], out[None])


def test_unknown_backends(device):
    a, b, one = ones(device, BF16, M, K), ones(device, BF16, N, K).T, torch.ones((), device=device)
    with pytest.raises(BackendSupportedError, match=r"mm_bf16 does not support backend 'tgv'.*usable here: cudnn"):
        flashinfer.mm_bf16(a, b, backend="tgv")
    with pytest.raises(BackendSupportedError, match="does not support backend 'cutlass'"):
        flashinfer.bmm_fp8(a[None].to(E4M3), b[None].to(E4M3), one, one, BF16, None, "cutlass")


def test_an_argument_of_another_kind_is_named():
    a, b = ones("cpu", BF16, M, K), ones("cpu", BF16, N, K).T
    with pytest.raises(TypeError, match=r"mm_bf16: b must be Tensor.*, got a NoneType"):
        flashinfer.mm_bf16(a, None)
    with pytest.raises(TypeError, match=r"bmm_fp8: A_scale must be Tensor.*, got a float"):
        flashinfer.bmm_fp8(a[None].to(E4M3), b[None].to(E4M3), 1.0, 1.0, BF16)
