# SPDX-License-Identifier: Apache-2.0
"""Products under the path of the published Triton kernels: strides, factors, in place, and the texts of errors."""

from __future__ import annotations

import re

import pytest
import torch

from flashinfer._runtime.errors import BackendSupportedError
from flashinfer.trace.templates import gemm_grouped
from flashinfer.triton import gemm as triton_gemm
from flashinfer.triton.sm_constraint_gemm import gemm, gemm_descriptor_persistent, gemm_persistent

E4M3, FP16, BF16, FP32 = torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32
TOLERANCE = {FP16: 2**-9, BF16: 2**-7, FP32: 1e-4}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [E4M3, FP16, BF16, FP32])
@pytest.mark.parametrize("column_major", [True, False])
def test_values(column_major, dtype, device):
    a = torch.randn(21, 64, device=device).to(dtype)
    w = torch.randn(33, 64, device=device).to(dtype)
    b = w.T if column_major else w.T.contiguous()
    expected = gemm_grouped.sm_constraint_gemm_trace.reference(a, b)
    close(gemm(a, b), expected)
    for num_sms in (None, 1, 10_000):
        close(gemm_persistent(a, b, num_sms=num_sms), expected)
    if dtype != FP32:
        close(gemm_descriptor_persistent(a, w, None, 1.0, 0.0, None, 16, True), expected)


@pytest.mark.parametrize("dtype, out_dtype", [(E4M3, BF16), (FP16, FP16), (BF16, FP32)])
def test_accumulates_in_place(dtype, out_dtype, device):
    a, w = torch.randn(5, 64, device=device).to(dtype), torch.randn(17, 64, device=device).to(dtype)
    former = torch.randn(5, 17, device=device).to(out_dtype)
    expected = gemm_grouped.sm_constraint_gemm_trace.reference(a, w.T, former, 0.5, -2.0)
    for function, b in ((gemm, w.T), (gemm_persistent, w.T), (gemm_descriptor_persistent, w)):
        c = former.clone()
        assert function(a, b, c, 0.5, -2.0, out_dtype) is c
        close(c, expected)


def test_c_is_not_read_without_beta(device):
    a, b = torch.randn(4, 16, device=device), torch.randn(16, 8, device=device)
    c = torch.full((4, 8), torch.nan, device=device)
    close(gemm(a, b, c), a @ b)
    close(gemm(a, b, beta=3.0, out_dtype=FP32), a @ b)  # there is no former C


def ones(*shape: int, dtype: torch.dtype = FP16) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


ERRORS = [
    (gemm, (ones(4, 16), ones(8, 16)), {}, "Incompatible dimensions"),
    (gemm_descriptor_persistent, (ones(4, 16), ones(16, 8)), {}, "Incompatible dimensions"),
    (gemm, (ones(4, 16), ones(16, 8, dtype=BF16)), {}, "Incompatible dtypes"),
    (gemm, (ones(4, 16), ones(16, 8), ones(4, 9)), {}, "Incompatible dimensions: c must have shape (4, 8), got (4, 9)"),
    (gemm, (ones(4, 16), ones(16, 8), ones(4, 8)), {"out_dtype": BF16}, "Incompatible dtypes: c must have dtype"),
    (gemm, (ones(4, 16), ones(16, 8)), {"out_dtype": E4M3}, "Incompatible dtypes: out_dtype must be one of"),
    (gemm_persistent, (ones(4, 16), ones(16, 8)), {"num_sms": 0}, "num_sms must be a positive integer or None, got 0"),
    (gemm_descriptor_persistent, (ones(4, 16, dtype=FP32), ones(8, 16, dtype=FP32)), {}, "Incompatible dtypes: b must"),
    (gemm_descriptor_persistent, (ones(4, 16), ones(7, 16)), {}, "must have at least 16 bytes"),
    (gemm_descriptor_persistent, (ones(4, 16), ones(16, 8).T), {}, "b must be contiguous"),
]


@pytest.mark.parametrize("function, arguments, keywords, text", ERRORS)
def test_texts(function, arguments, keywords, text):
    with pytest.raises(AssertionError, match=re.escape(text)) as caught:
        function(*arguments, **keywords)
    assert str(caught.value).startswith(f"{function.__name__}: ")


@pytest.mark.parametrize("name", triton_gemm.__all__)
def test_kernels_of_tables_say_that_they_are_not_needed(name):
    kernel = getattr(triton_gemm, name)
    for launch in (kernel, kernel[(1,)]):
        with pytest.raises(BackendSupportedError, match=f"{name}: needs Triton kernels"):
            launch(1, 2, 3)
