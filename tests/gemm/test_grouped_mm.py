# SPDX-License-Identifier: Apache-2.0
"""grouped_mm: values, empty experts, the texts of errors, and the published capabilities."""

from __future__ import annotations

import re

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import BackendSupportedError
from flashinfer.grouped_mm import core, cudnn, grouped_mm_bf16, grouped_mm_fp8
from flashinfer.trace.templates import gemm_grouped

from .scaled import BF16, E4M3, E5M2, FP16, poisoned

FP32 = torch.float32
BOUNDS = [(0, 3, 3, 8), (0, 0, 0, 0), (0, 0, 130, 131)]
TOLERANCE = {BF16: 2**-7, FP16: 2**-9, FP32: 1e-4}


def operands(rows: int, dtypes: tuple[torch.dtype, torch.dtype], device: str, n: int = 24, k: int = 72):
    a, b = torch.randn(rows, k, device=device).to(dtypes[0]), torch.randn(3, n, k, device=device).to(dtypes[1])
    return a, b


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32])
def test_bf16(out_dtype, bounds, device):
    a, b = operands(bounds[-1], (BF16, BF16), device)
    indptr = torch.tensor(bounds, dtype=torch.int32, device=device)
    out = poisoned(bounds[-1], 24, device=device, dtype=out_dtype)
    assert grouped_mm_bf16(a, b, indptr, out, BF16) is out  # the dtype of out wins
    close(out, gemm_grouped.grouped_mm_bf16_trace.reference(a, b, indptr, out_dtype))
    assert torch.equal(grouped_mm_bf16(a, b, indptr, out_dtype=out_dtype, tactic=3), out)


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
@pytest.mark.parametrize("with_alpha", [False, True])
def test_fp8(with_alpha, dtypes, device):
    a, b = operands(8, dtypes, device)
    indptr = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=device)
    alpha = torch.tensor([0.3], device=device) if with_alpha else None
    out = poisoned(8, 24, device=device)
    assert grouped_mm_fp8(a, b, indptr, alpha, out) is out
    close(out, gemm_grouped.grouped_mm_fp8_trace.reference(a, b, indptr, alpha))
    if with_alpha:
        assert torch.equal(grouped_mm_fp8(a, b, indptr, alpha[0]), out)


ERRORS = [
    ({"a": lambda x: x.half()}, "dtype of a and b must be"),
    ({"a": lambda x: x[0]}, "a must be 2D"),
    ({"b": lambda x: x[0]}, "b must be 3D"),
    ({"m_indptr": lambda x: x.long()}, "m_indptr must be int32, got torch.int64"),
    ({"m_indptr": lambda x: x[:3]}, "m_indptr length must be experts + 1 = 4, got (3,)"),
    ({"a": lambda x: x[:, :64]}, "K mismatch: a and b must have the same k, got 64 and 72"),
    ({"out": lambda _: torch.empty(8, 25, dtype=BF16)}, "out shape must be (8, 24), got (8, 25)"),
    ({"out": lambda _: torch.empty(8, 24, dtype=BF16, device="meta")}, "out device must be cpu, got meta"),
    ({"out_dtype": E4M3}, "Unsupported output dtype"),
]
FP8_ERRORS = [
    ({"alpha": torch.ones(1, dtype=FP16)}, "alpha must be float32, got torch.float16"),
    ({"alpha": torch.ones(2)}, "alpha must be a scalar, one element, got shape (2,)"),
]
CASES = [(grouped_mm_bf16, BF16, *case) for case in ERRORS] + [
    (grouped_mm_fp8, E4M3, *case) for case in ERRORS + FP8_ERRORS
]


@pytest.mark.parametrize("function, dtype, changes, text", CASES)
def test_texts(function, dtype, changes, text):
    a, b = operands(8, (dtype, dtype), "cpu")
    arguments = {"a": a, "b": b, "m_indptr": torch.tensor([0, 3, 3, 8], dtype=torch.int32)}
    for name, change in changes.items():
        arguments[name] = change(arguments.get(name)) if callable(change) else change
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        function(**arguments)
    assert str(caught.value).startswith(f"{function.__name__}: ")


@pytest.mark.parametrize("function, dtype", [(grouped_mm_bf16, BF16), (grouped_mm_fp8, E4M3)])
def test_an_unknown_backend_is_a_value_error_too(function, dtype):
    a, b = operands(8, (dtype, dtype), "cpu")
    indptr = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    for error in (ValueError, BackendSupportedError):
        with pytest.raises(error, match="backend does not support") as caught:
            function(a, b, indptr, backend="triton")
    assert str(caught.value).startswith(f"{function.__name__} does not support backend 'triton'")
    assert function(a, b, indptr, backend="auto").shape == (8, 24)


def test_published_capabilities():
    bf16 = {80, 86, 87, 89, 90, 100, 103, 110, 120, 121}
    assert core._check_grouped_mm_bf16._supported_ccs == bf16
    assert core._check_grouped_mm_fp8._supported_ccs == bf16 - {80, 86, 87}
    for name in ("mxfp8", "fp4"):
        assert getattr(core, f"_check_grouped_mm_{name}")._supported_ccs == {cc for cc in bf16 if cc >= 100}
    assert cudnn._CUDNN_MOE_MIN_VERSION == 92100
    for function in (grouped_mm_bf16, grouped_mm_fp8):
        assert function.is_backend_supported("cudnn", 90) and function.is_backend_supported("cudnn", 0)
        assert not function.is_compute_capability_supported(75)


def test_top_level_names():
    assert flashinfer.grouped_mm_bf16 is grouped_mm_bf16 and flashinfer.grouped_mm_fp8 is grouped_mm_fp8


def test_torch_compile_keeps_the_call_in_the_graph():
    a, b = operands(8, (BF16, BF16), "cpu")
    indptr = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    compiled = torch.compile(lambda *x: grouped_mm_bf16(*x), fullgraph=True, backend="eager")
    assert torch.equal(compiled(a, b, indptr), grouped_mm_bf16(a, b, indptr))
