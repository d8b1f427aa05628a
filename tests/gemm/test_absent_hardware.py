# SPDX-License-Identifier: Apache-2.0
"""Names of products that only other GPUs have: they import, say that they support nothing, and raise."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

import flashinfer
from flashinfer import gemm, grouped_mm
from flashinfer._runtime.errors import BackendSupportedError

IN_GEMM = [
    *("mm_fp8", "bmm_mxfp8", "mm_bf16_fp4", "prepare_bf16_fp4_weights", "mm_nvfp4_svdquant"),
    *("nvfp4_quantize_smooth", "svdquant_linear", "tgv_gemm_sm100", "group_gemm_mxfp4_nt_groupwise"),
    *("group_gemm_mxfp8_mxfp4_nt_groupwise", "group_gemm_nvfp4_nt_groupwise", "grouped_gemm_nt_masked"),
    "create_scale_factor_tensor",
    *("Sm100BlockScaledPersistentDenseGemmKernel", "Sm120B12xBlockScaledDenseGemmKernel"),
]
IN_GROUPED_MM = ["grouped_mm_mxfp8", "grouped_mm_fp4", "moe_gemm_fp8_nt_groupwise", "moe_gemm_mxfp8_nt_groupwise"]
AT_TOP = [
    *("mm_fp8", "bmm_mxfp8", "mm_bf16_fp4", "prepare_bf16_fp4_weights", "mm_nvfp4_svdquant"),
    *("nvfp4_quantize_smooth", "svdquant_linear", "tgv_gemm_sm100", "prepare_low_latency_gemm_weights"),
]
ELSEWHERE = [
    ("flashinfer.gemm.gemm_bf16_fp4", "mm_bf16_fp4"),
    ("flashinfer.gemm.gemm_svdquant", "get_nvfp4_svdquant_module"),
    ("flashinfer.gemm.kernels.grouped_gemm_masked_wrapper", "grouped_gemm_nt_masked"),
    ("flashinfer.trtllm_low_latency_gemm", "trtllm_low_latency_gemm"),
    ("flashinfer.deep_gemm", "get_col_major_tma_aligned_packed_tensor"),
]
EVERY = [
    *(pytest.param(gemm, name, id=f"gemm.{name}") for name in IN_GEMM),
    *(pytest.param(grouped_mm, name, id=f"grouped_mm.{name}") for name in IN_GROUPED_MM),
    *(pytest.param(flashinfer, name, id=name) for name in AT_TOP),
    *(pytest.param(importlib.import_module(module), name, id=f"{module}.{name}") for module, name in ELSEWHERE),
]


@pytest.mark.parametrize("module, name", EVERY)
def test_raises_what_callers_catch(module, name):
    function = getattr(module, name)
    is_traced = hasattr(function, "fi_trace")  # then the call is bound to the published signature
    arguments = dict.fromkeys(("a", "b", "a_descale", "b_descale")) if is_traced else {"unknown": 1}
    for error in (BackendSupportedError, ValueError):
        with pytest.raises(error, match=rf"^{name}: needs a.*(Blackwell GPU|SM1)"):
            function(**arguments)
    assert not function.is_compute_capability_supported(90)
    assert not function.is_backend_supported("cudnn", 100)


def test_signatures_are_the_published_ones():
    assert list(inspect.signature(gemm.mm_fp8).parameters) == ["a", "b", "alpha", "out_dtype", "out", "backend"]
    assert inspect.signature(gemm.mm_mxfp8).parameters["out_dtype"].default is torch.bfloat16
    assert list(inspect.signature(gemm.mm_fp4).parameters)[6:8] == ["out", "block_size"]
    assert inspect.signature(gemm.grouped_gemm_nt_masked).parameters["ab_dtype"].kind is inspect.Parameter.KEYWORD_ONLY


def test_constants():
    from flashinfer.gemm import gemm_svdquant

    assert gemm_svdquant.SVDQUANT_LORA_RANK_GRANULARITY == 32
    assert gemm_svdquant.DEFAULT_WORKSPACE_SIZE > 0
