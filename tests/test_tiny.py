# SPDX-License-Identifier: Apache-2.0
"""Smoke test for a laptop without a GPU: every function of every family once, in seconds.

The family tests go through shapes, dtypes and errors; this file only says whether an installation works.
"""

import functools

import pytest
import torch

import flashinfer
from flashinfer.testing import assert_close
from flashinfer.trace.templates import activation as activation_templates
from flashinfer.trace.templates import cascade as cascade_templates
from flashinfer.trace.templates import norm as templates
from flashinfer.trace.templates import quantization as quantization_templates
from flashinfer.trace.templates import topk as topk_templates
from flashinfer.trace.templates.concat_ops import concat_mla_k_trace

ROWS, HIDDEN = 3, 40
rand = functools.partial(torch.randn, dtype=torch.bfloat16)
fp8_out = functools.partial(torch.empty, ROWS, HIDDEN, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("name", ["rmsnorm", "gemma_rmsnorm"])
def test_rmsnorm(name):
    x, w = rand(ROWS, HIDDEN), rand(HIDDEN)
    assert_close(getattr(flashinfer, name)(x, w), getattr(templates, f"{name}_trace").reference(x, w))


@pytest.mark.parametrize("name", ["fused_add_rmsnorm", "gemma_fused_add_rmsnorm"])
def test_fused_add(name):
    x, residual, w = rand(ROWS, HIDDEN), rand(ROWS, HIDDEN), rand(HIDDEN)
    expected = getattr(templates, f"{name}_trace").reference(x, residual, w)
    getattr(flashinfer, name)(x, residual, w)
    assert_close((x, residual), expected)


def test_rmsnorm_quant():
    x, w, scale, out = rand(ROWS, HIDDEN), rand(HIDDEN), torch.tensor([0.25]), fp8_out()
    flashinfer.rmsnorm_quant(out, x, w, scale)
    assert_close(out, templates.rmsnorm_quant_trace.reference(x, w, scale))


def test_fused_add_rmsnorm_quant():
    x, residual, w, scale, out = rand(ROWS, HIDDEN), rand(ROWS, HIDDEN), rand(HIDDEN), torch.tensor([0.25]), fp8_out()
    expected = templates.fused_add_rmsnorm_quant_trace.reference(x, residual, w, scale)
    flashinfer.fused_add_rmsnorm_quant(out, x, residual, w, scale)
    assert_close((out, residual), expected)


def test_layernorm():
    x, gamma, beta = rand(ROWS, HIDDEN), torch.randn(HIDDEN), torch.randn(HIDDEN)
    assert_close(flashinfer.layernorm(x, gamma, beta), templates.layernorm_trace.reference(x, gamma, beta))


def test_layernorm_quant():
    x, gamma, beta, scale, out = (
        rand(ROWS, HIDDEN),
        torch.randn(HIDDEN),
        torch.randn(HIDDEN),
        torch.tensor(0.5),
        fp8_out(),
    )
    flashinfer.layernorm_quant(out, x, gamma, beta, scale)
    assert_close(out, templates.layernorm_quant_trace.reference(x, gamma, beta, scale))


@pytest.mark.parametrize(
    "name",
    [
        "fused_dit_gate_residual_layernorm_gamma_beta",
        "fused_dit_gate_residual_layernorm_scale_shift",
        "fused_dit_residual_layernorm_scale_shift",
    ],
)
def test_dit_layernorm(name):
    template = getattr(templates, f"{name}_trace")
    inputs = template.init(batch_size=1, seq_len=2)
    assert_close(getattr(flashinfer, name)(**inputs), template.reference(**inputs))


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_act_and_mul(name):
    x = rand(ROWS, 2 * HIDDEN)
    assert_close(getattr(flashinfer, name)(x), getattr(activation_templates, f"{name}_trace").reference(x))


def test_swiglu():
    x, gate = rand(ROWS, HIDDEN), rand(ROWS, HIDDEN)
    assert_close(flashinfer.swiglu(x, gate), activation_templates.swiglu_trace.reference(x, gate))


def test_concat_mla_k():
    k, k_nope, k_rope = rand(ROWS, 128, 192), rand(ROWS, 128, 128), rand(ROWS, 1, 64)
    expected = concat_mla_k_trace.reference(k.clone(), k_nope, k_rope)
    flashinfer.concat_mla_k(k, k_nope, k_rope)
    assert torch.equal(k, expected)


def test_merge_states():
    v, s = rand(ROWS, 2, 3, HIDDEN), torch.randn(ROWS, 2, 3)
    expected = cascade_templates.merge_states_trace.reference(v, s)
    assert_close(flashinfer.merge_states(v, s), expected)
    (v_a, v_b), (s_a, s_b) = v.unbind(1), s.unbind(1)
    assert_close(flashinfer.merge_state(v_a, s_a, v_b, s_b), expected)
    flashinfer.merge_state_in_place(v_a, s_a, v_b, s_b)
    assert_close((v_a, s_a), expected)


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("segment_packbits", {"num_bits": 45}),
        ("mxfp8_quantize", {"M": 3, "device": "cpu"}),
        ("mxfp8_dequantize_host", {"num_rows": 3}),
        ("e2m1_and_ufp8sf_scale_to_float", {"num_rows": 3}),
        ("mxfp4_dequantize", {"num_rows": 3}),
        ("mxfp4_dequantize_host", {"num_rows": 3}),
        ("nvfp4_kv_dequantize", {"num_rows": 3}),
    ],
)
def test_quantization(name, sizes):
    template = getattr(quantization_templates, f"{name}_trace")
    inputs = template.init(**sizes)
    expected = template.reference(**inputs)
    if name == "mxfp8_quantize":  # on the CPU, the quantised numbers are returned as bytes
        expected = (expected[0].view(torch.uint8), expected[1])
    assert_close(getattr(flashinfer, name)(**inputs), expected)


def test_top_k():
    for name, sizes in {
        "top_k": {},
        "top_k_page_table_transform": {"num_rows": 3, "device": "cpu"},
        "top_k_ragged_transform": {"num_rows": 3, "device": "cpu"},
        "top_k_varlen": {"batch_size": 3, "device": "cpu"},
    }.items():
        template = getattr(topk_templates, f"{name}_trace")
        inputs = template.init(**sizes)
        inputs["top_k" if name == "top_k_varlen" else "k"] = 5
        result, expected = getattr(flashinfer, name)(**inputs), template.reference(**inputs)
        assert template.check(expected, result[0] if name == "top_k_varlen" else result), name


def test_nvfp4_kv_dequantize_paged():
    template = quantization_templates.nvfp4_kv_dequantize_paged_trace
    inputs = template.init(batch_size=2)
    expected = template.reference(**inputs)
    flashinfer.nvfp4_kv_dequantize_paged(**inputs)
    assert_close((inputs["output_k"], inputs["output_v"]), expected)


def test_bits_and_layouts():
    x = torch.randint(0, 256, (128, 5), dtype=torch.uint8)
    for name, arguments in (
        ("packbits", (x,)),
        ("block_scale_interleave", (x,)),
        ("shuffle_matrix_a", (x, 64)),
        ("shuffle_matrix_sf_a", (x, 128)),
    ):
        reference = getattr(quantization_templates, f"{name}_trace").reference
        assert_close(getattr(flashinfer, name)(*arguments), reference(*arguments))


def _qk_rmsnorm_rope():
    channels = {"num_frame_channels": 16, "num_height_channels": 24, "num_width_channels": 24, "head_dim": 64}
    heads = {"num_heads_q": 1, "num_heads_k": 1, "num_heads_v": 1}
    qkv, weight = rand(1, 4, 3 * 64), rand(64)
    return flashinfer.fused_qk_rmsnorm_rope(qkv, weight, weight, ppf=1, pph=2, ppw=2, **channels, **heads)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: flashinfer.scale(torch.ones(4), 2.0), id="scale"),
        pytest.param(lambda: flashinfer.fused_rmsnorm_silu(rand(ROWS, HIDDEN), rand(HIDDEN)), id="fused_rmsnorm_silu"),
        pytest.param(_qk_rmsnorm_rope, id="fused_qk_rmsnorm_rope"),
    ],
)
def test_cuda_only_ops_say_so(call):
    with pytest.raises((ValueError, RuntimeError), match="CUDA"):
        call()
