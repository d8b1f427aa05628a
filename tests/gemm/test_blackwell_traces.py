# SPDX-License-Identifier: Apache-2.0
"""Definitions of products whose kernels need Blackwell: their references, and ``fi_trace`` of the names."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import quantization
from flashinfer.trace.templates.gemm import mm_fp4_trace, mm_mxfp8_trace
from flashinfer.trace.templates.quantization_blocks import padded_scales

M, N, K = 5, 24, 64


def test_mxfp8_reference():
    """Check against values that mxfp8_dequantize_host gives back."""
    made = mm_mxfp8_trace.init(M=M, N=N, K=K, device="cpu")
    a = quantization.mxfp8_dequantize_host(made["a"].view(torch.uint8), made["a_descale"])
    b = quantization.mxfp8_dequantize_host(made["b"].T.contiguous().view(torch.uint8), made["b_descale"])
    expected = (a @ b.T).bfloat16()
    assert torch.equal(mm_mxfp8_trace.reference(**made), expected)


def test_fp4_reference():
    """Check against values that e2m1_and_ufp8sf_scale_to_float gives back."""
    made = mm_fp4_trace.init(M=M, N=N, K=K // 2, device="cpu")
    one = torch.ones(1)
    a = quantization.e2m1_and_ufp8sf_scale_to_float(made["a"], made["a_descale"], one, 16, 1)
    b = quantization.e2m1_and_ufp8sf_scale_to_float(made["b"].T.contiguous(), made["b_descale"], one, 16, 1)
    torch.testing.assert_close(mm_fp4_trace.reference(**made), (a @ b.T * 0.125).bfloat16())


def test_scales_in_tiles_of_8():
    made = mm_mxfp8_trace.init(M=M, N=N, K=K, device="cpu")
    linear = torch.randint(120, 130, (M, K // 32), dtype=torch.uint8)
    outputs = [
        mm_mxfp8_trace.reference(**made | {"a_descale": padded_scales(linear, layout)}, use_8x4_sf_layout=layout == 1)
        for layout in (0, 1)
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("api, name", [("mm_fp4", "mm_fp4_n24_k32"), ("mm_mxfp8", "mm_mxfp8_n24_k64")])
def test_definitions_need_no_kernel(api, name):
    function = getattr(flashinfer, api)
    sizes = {"M": M, "N": N, "K": K // 2} if api == "mm_fp4" else {"M": M, "N": N, "K": K}
    definition = function.fi_trace(**function.fi_init(**sizes, device="cpu"))
    assert definition["name"] == name and definition["tags"][0] == f"fi_api:flashinfer.gemm.gemm_base.{api}"
    assert definition["outputs"]["out"]["dtype"] == "bfloat16"
