# SPDX-License-Identifier: Apache-2.0
"""Names that published code imports for CuTe DSL kernels: activations, buffers of the sort, probes, rows of scales."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import cute_dsl
from flashinfer._compat.tllm_enums import ActivationType
from flashinfer.cute_dsl import utils
from flashinfer.fused_moe.cute_dsl import moe_utils
from flashinfer.fused_moe.utils import make_random_topk_ids
from flashinfer.testing import assert_close
from flashinfer.trace.templates.fused_moe_permute import moe_unpermute_trace


def test_activations():
    normalize = moe_utils.normalize_cute_dsl_moe_activation_type
    assert normalize(3) == (ActivationType.Swiglu, True) and normalize("Relu2") == (ActivationType.Relu2, False)
    assert normalize(ActivationType.GegluTanh) == (ActivationType.GegluTanh, True)
    for wrong in (ActivationType.Silu, 99, "swish", None):
        with pytest.raises(ValueError, match="Unsupported activation_type"):
            normalize(wrong)
    assert [(one.name, one.value) for one in moe_utils.MoeActivationType] == [
        *(("Gelu", 0), ("Relu", 1), ("Silu", 2), ("Swiglu", 3), ("Geglu", 4), ("Identity", 5))
    ]


def test_constants_of_activations():
    swiglu, situ = moe_utils.validate_cute_dsl_moe_swiglu_config, moe_utils.validate_cute_dsl_moe_situ_config
    swiglu(1.702, 1.0, 7.0)
    for wrong in ((1.0, 0.0, 0.0), (1.0, 0.0, 1e-60), (1.0, 0.0, 1e39)):
        with pytest.raises(ValueError, match="limit must be positive and finite in fp32"):
            swiglu(*wrong)
    with pytest.raises(ValueError, match="alpha must be finite in fp32, got nan"):
        swiglu(float("nan"), 0.0, 1.0)
    situ(ActivationType.Relu2, None, None)
    situ(ActivationType.Swiglu, 4.0, 25.0)
    for arguments, text in (
        ((ActivationType.Swiglu, None, 25.0), "situ_linear_beta requires situ_beta"),
        ((ActivationType.Relu2, 4.0, None), r"SiTU parameters require ActivationType\.Swiglu"),
        ((ActivationType.Swiglu, -4.0, None), "situ_beta must be positive and finite in fp32"),
        ((ActivationType.Swiglu, 4.0, float("inf")), "situ_linear_beta must be positive and finite in fp32"),
    ):
        with pytest.raises(ValueError, match=text):
            situ(*arguments)


def test_buffers_of_the_sort(device):
    ids = torch.tensor([[1, 0], [1, 2]], dtype=torch.int32, device=device)
    buffers = moe_utils.allocate_moe_sort_buffers(2, 4, 2, tile_tokens_dim=4, device=device)
    made = moe_utils.moe_sort(ids, None, 4, 2, tile_tokens_dim=4, **buffers)
    for got, buffer, expected in zip(
        made, buffers.values(), moe_utils.moe_sort(ids, None, 4, 2, tile_tokens_dim=4), strict=True
    ):
        assert got is buffer and torch.equal(got, expected)


def test_scales_go_with_their_rows(device):
    x = torch.randn(2, 16, device=device)
    scales = torch.arange(8, dtype=torch.uint8, device=device).view(2, 4)
    pairs = torch.tensor([0, 2, 3, 1], dtype=torch.int32, device=device)
    rows, of_rows = torch.zeros(4, 16, device=device), torch.zeros(4, 4, dtype=torch.uint8, device=device)
    moe_utils.moe_permute(x, rows, None, pairs, None, 4, 2, 1, input_sf=scales, permuted_sf=of_rows)
    where = [0, 1, 1, 0]
    assert torch.equal(rows, x[where]) and torch.equal(of_rows, scales[where])
    with pytest.raises(ValueError, match="must both be given or neither, got input_sf alone"):
        moe_utils.moe_permute(x, rows, None, pairs, None, 4, 2, 1, input_sf=scales)


def test_rows_in_the_order_of_slots(device):
    rows, out = torch.randn(6, 16, device=device), torch.empty(3, 16, device=device)
    where = torch.tensor([[5, -1], [0, 3], [1, 2]], dtype=torch.int32, device=device)
    scales = torch.rand(3, 2, device=device)
    moe_utils.moe_unpermute(rows, out, where, scales, 3, 2, input_is_expanded=True)
    kept = torch.tensor([[1, 0], [1, 1], [1, 1]], device=device)
    assert_close(out, ((scales * kept).unsqueeze(2) * rows.view(3, 2, 16)).sum(1))
    assert_close(moe_unpermute_trace.reference(rows, out, where, scales, input_is_expanded=True), out)
    with pytest.raises(ValueError, match="must have num_tokens \\* top_k = 6 rows"):
        moe_utils.moe_unpermute(rows[:5], out, where, scales, 3, 2, input_is_expanded=True)


def test_probes():
    for module in (cute_dsl, utils):
        assert not module.is_cute_dsl_arch_supported(10, 0) and not module.is_cute_dsl_arch_supported(9, 0, True)
        assert not module.is_rubin_cute_dsl_available() and not module.is_cute_dsl_experimental_available()
        with pytest.raises(NotImplementedError, match="must have kernels in the CuTe DSL"):
            module.require_cute_dsl_arch("cuda:0")
    names = ("trtllm_fp8_per_tensor_scale_routed_moe", "cudnn_frost_grouped_gemm1_swiglu")
    for name in (*names, "cudnn_frost_grouped_gemm1_swiglu_workspace_size"):
        with pytest.raises(ValueError, match=f"{name}: needs a Blackwell GPU"):
            getattr(flashinfer, name)()


def test_random_ids_of_a_generator():
    a, b = (make_random_topk_ids(8, 5, 3, "cpu", generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(a, b)
