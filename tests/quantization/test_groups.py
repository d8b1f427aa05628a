# SPDX-License-Identifier: Apache-2.0
"""Quantisation of groups of columns of a token, and of keys and values of MLA, to 8 bits."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import BackendSupportedError
from flashinfer.concat_ops import concat_mla_kv_quant_fp8
from flashinfer.quantization import block_scale_interleave, per_token_group_quant_8bit
from flashinfer.trace.templates.concat_ops import concat_mla_kv_quant_fp8_trace
from flashinfer.trace.templates.quantization_groups import per_token_group_quant_8bit_trace

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    "options", [{}, {"scale_ue8m0": True}, {"dst_dtype": torch.int8}, {"dst_dtype": torch.float8_e5m2}]
)
def test_values(device, options):
    x = torch.randn(5, 256, device=device).bfloat16() * 100
    x[0, :128] = 0
    values, scales = per_token_group_quant_8bit(x, 128, **options)
    expected, expected_scales = per_token_group_quant_8bit_trace.reference(x, 128, **options)
    assert values.dtype == expected.dtype and not values[0, :128].float().any()
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    # A value near the middle of two numbers may fall to either side: they are a quarter apart at most, or one.
    torch.testing.assert_close(values.float(), expected.float(), rtol=0.25, atol=1.0)
    assert (values.float() != expected.float()).float().mean() < 0.02


def test_layouts_of_scales(device):
    x = torch.randn(2, 5, 512, device=device)
    _, plain = per_token_group_quant_8bit(x, 128)
    _, columns = per_token_group_quant_8bit(x, 128, column_major_scales=True)
    _, aligned = per_token_group_quant_8bit(x, 128, column_major_scales=True, scale_tma_aligned=True)
    assert plain.stride() == (20, 4, 1) and columns.stride() == (20, 1, 5) and aligned.stride() == (32, 1, 8)
    assert torch.equal(plain, columns) and torch.equal(plain, aligned)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"group_size": 100}, "divisible by group_size = 100"),
        ({"group_size": 128, "dst_dtype": torch.float16}, "dst_dtype must be float8_e4m3fn"),
        ({"group_size": 128, "eps": 0.0}, "eps must be positive"),
        ({"group_size": 128, "scale_tma_aligned": True}, "must be False without column_major_scales"),
        ({"group_size": 128, "backend": "triton"}, "does not support backend 'triton'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(arguments, text):
    with pytest.raises((ValueError, BackendSupportedError), match=text):
        per_token_group_quant_8bit(torch.ones(2, 256), **arguments)


@pytest.mark.parametrize("has_heads", [False, True])
def test_keys_and_values_of_mla(device, has_heads):
    kv, pe = torch.randn(3, 4, 256, device=device).bfloat16(), torch.randn(3, 64, device=device).bfloat16() * 300
    shaped = pe.unsqueeze(1) if has_heads else pe
    key, value = concat_mla_kv_quant_fp8(kv, shaped)
    expected = concat_mla_kv_quant_fp8_trace.reference(kv, shaped)
    for got, wanted in zip((key, value), expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    wide = torch.zeros(3, 4, 400, dtype=E4M3, device=device)
    results = concat_mla_kv_quant_fp8(kv, shaped, wide[..., :192], wide[..., 200:328])
    assert torch.equal(results[0].float(), key.float()) and torch.equal(wide[..., 200:328].float(), value.float())
    assert flashinfer.concat_ops.concat_mla_kv_quant_fp8(kv, shaped, nope_dim=64)[1].shape == (3, 4, 192)


def test_refused_keys():
    kv, pe = torch.randn(3, 4, 256), torch.randn(3, 64)
    with pytest.raises(ValueError, match=r"k_pe must be \(3, rope_dim\)"):
        concat_mla_kv_quant_fp8(kv, pe[:2])
    with pytest.raises(ValueError, match="more than nope_dim = 256"):
        concat_mla_kv_quant_fp8(kv, pe, nope_dim=256)
    with pytest.raises(ValueError, match=r"key must be \(3, 4, 192\) float8_e4m3fn"):
        concat_mla_kv_quant_fp8(kv, pe, torch.empty(3, 4, 192))
    with pytest.raises(BackendSupportedError, match="does not support backend 'cuda'"):
        concat_mla_kv_quant_fp8(kv, pe, backend="cuda")


def test_interleaved_scales_in_a_buffer(device):
    scales = torch.randint(256, (130, 5), dtype=torch.uint8, device=device)
    expected = block_scale_interleave(scales)
    out = torch.empty(256, 8, dtype=torch.uint8, device=device)
    assert block_scale_interleave(scales, out=out) is out and torch.equal(out.view(-1), expected)
    with pytest.raises(ValueError, match=r"out must be contiguous with 2048 elements of torch\.uint8"):
        block_scale_interleave(scales, out=out[:128])
