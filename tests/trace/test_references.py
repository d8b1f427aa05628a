# SPDX-License-Identifier: Apache-2.0
"""The references of all kernels, compared with torch where it has the op, with plain loops elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from flashinfer.trace.templates import attention_blackwell as latent
from flashinfer.trace.templates import norm, quantization, quantize
from flashinfer.trace.templates.scale import scale_trace

ROWS, HIDDEN = 5, 96
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(ROWS, HIDDEN), (ROWS, 3, HIDDEN)])
def test_rmsnorm(dtype, shape):
    x, w = rand(*shape, dtype=dtype), rand(HIDDEN, dtype=dtype)
    exact = F.rms_norm(x.double(), (HIDDEN,), w.double(), 1e-5)
    torch.testing.assert_close(norm.rmsnorm_trace.reference(x, w, 1e-5), exact.to(dtype))
    exact = F.rms_norm(x.double(), (HIDDEN,), 1 + w.double(), 1e-5)
    torch.testing.assert_close(norm.gemma_rmsnorm_trace.reference(x, w, 1e-5), exact.to(dtype))


@pytest.mark.parametrize("gemma", [False, True])
def test_fused_add_normalises_the_unrounded_sum(gemma):
    template = norm.gemma_fused_add_rmsnorm_trace if gemma else norm.fused_add_rmsnorm_trace
    x, residual, w = rand(ROWS, HIDDEN), 0.01 * rand(ROWS, HIDDEN), rand(HIDDEN)
    out, residual_out = template.reference(x, residual, w, 1e-6)
    total = x.double() + residual.double()
    exact = F.rms_norm(total, (HIDDEN,), w.double() + gemma, 1e-6)
    assert torch.equal(residual_out, total.to(torch.bfloat16))
    torch.testing.assert_close(out, exact.to(torch.bfloat16), rtol=1 / 256, atol=0)
    assert not torch.equal(out, norm.rmsnorm_trace.reference(residual_out, w, 1e-6))


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("scale", [0.001, torch.tensor(0.7), torch.tensor([3.0])])
def test_quantisation_saturates_and_rounds_once(dtype, scale):
    x, w = rand(ROWS, HIDDEN), rand(HIDDEN)
    out = norm.rmsnorm_quant_trace.reference(x, w, scale, 1e-6, dtype)
    assert out.dtype == dtype
    limit = torch.finfo(dtype).max
    exact = (F.rms_norm(x.double(), (HIDDEN,), w.double(), 1e-6) / float(scale)).clamp(-limit, limit)
    torch.testing.assert_close(out.double(), exact, rtol=2.0 ** -(3 if dtype == FP8[1] else 4), atol=2.0**-9)
    assert out.float().isfinite().all()
    assert (out.float().abs().max() == limit) == (float(scale) == 0.001 and dtype == FP8[0])


@pytest.mark.parametrize("dtype", FP8)
def test_fused_add_quant_agrees_with_its_parts(dtype):
    x, residual, w = rand(ROWS, HIDDEN), rand(ROWS, HIDDEN), rand(HIDDEN)
    out, residual_out = norm.fused_add_rmsnorm_quant_trace.reference(x, residual, w, 0.5, 1e-6, dtype)
    total = x.float() + residual.float()
    assert torch.equal(residual_out, total.to(torch.bfloat16))
    expected = norm.rmsnorm_quant_trace.reference(total, w, 0.5, 1e-6, dtype)
    assert torch.equal(out.float(), expected.float())


def test_layernorm():
    x, gamma, beta = rand(ROWS, HIDDEN) + 5, rand(HIDDEN, dtype=torch.float32), rand(HIDDEN, dtype=torch.float32)
    exact = F.layer_norm(x.double(), (HIDDEN,), gamma.double(), beta.double(), 1e-6)
    out = norm.layernorm_trace.reference(x, gamma, beta, 1e-6)
    torch.testing.assert_close(out, exact.to(torch.bfloat16))
    quantised = norm.layernorm_quant_trace.reference(x, gamma, beta, torch.tensor([0.5]), 1e-6)
    assert torch.equal(quantised.float(), (out.float() * 2).to(torch.float8_e4m3fn).float())  # quantises bf16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_fused_rmsnorm_silu(dtype):
    x, w = rand(ROWS, HIDDEN), rand(HIDDEN)
    exact = F.silu(F.rms_norm(x.double(), (HIDDEN,), w.double(), 1e-6))
    out = norm.fused_rmsnorm_silu_trace.reference(x, w, 1e-6, dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=1 / (256 if dtype == torch.bfloat16 else 16), atol=2.0**-9)


def dit(template, **extra):
    arguments = template.init(batch_size=2, seq_len=3, hidden_size=HIDDEN) | extra
    return arguments, template.reference(**arguments, epsilon=1e-5)


def test_dit_gamma_beta():
    a, (residual_out, out) = dit(
        norm.fused_dit_gate_residual_layernorm_gamma_beta_trace, gate_bias=torch.randn(1, HIDDEN)
    )
    r = a["residual"].double() + a["input"].double() * (a["gate"].double() + a["gate_bias"].double())
    exact = F.layer_norm(r, (HIDDEN,), a["gamma"].double(), a["beta"].double(), 1e-5)
    torch.testing.assert_close(residual_out.double(), r, rtol=1 / 256, atol=1e-6)
    torch.testing.assert_close(out.double(), exact, rtol=1 / 256, atol=1e-5)


@pytest.mark.parametrize("factor", [None, torch.tensor([0.25])])
def test_dit_gated_scale_shift(factor):
    a, (residual_out, out) = dit(
        norm.fused_dit_gate_residual_layernorm_scale_shift_trace,
        scale_bias=torch.randn(1, HIDDEN),
        shift_bias=torch.randn(HIDDEN),
        input_global_scaling_factor=factor,
    )
    r = a["residual"].double() + a["input"].double() * a["gate"].double() * (1.0 if factor is None else 0.25)
    scale = 1 + a["scale"].double() + a["scale_bias"].double()
    exact = F.layer_norm(r, (HIDDEN,), eps=1e-5) * scale + a["shift"].double() + a["shift_bias"].double()
    torch.testing.assert_close(residual_out.double(), r, rtol=1 / 256, atol=1e-6)
    torch.testing.assert_close(out.double(), exact, rtol=1 / 256, atol=1e-5)


@pytest.mark.parametrize("has_residual", [False, True])
def test_dit_scale_shift(has_residual):
    residual = rand(2, 3, HIDDEN) if has_residual else None
    a, (residual_out, out) = dit(norm.fused_dit_residual_layernorm_scale_shift_trace, residual=residual)
    r = a["input"].double() + (residual.double() if has_residual else 0.0)
    exact = F.layer_norm(r, (HIDDEN,), eps=1e-5) * (1 + a["scale"].double()) + a["shift"].double()
    torch.testing.assert_close(residual_out.double(), r, rtol=1 / 256, atol=1e-6)
    torch.testing.assert_close(out.double(), exact, rtol=1 / 256, atol=1e-5)


def test_dit_modulation_may_be_flat():
    template = norm.fused_dit_residual_layernorm_scale_shift_trace
    a = template.init(batch_size=2, seq_len=3, hidden_size=HIDDEN)
    flat = a | {name: a[name].flatten(0, 1) for name in ("scale", "shift")}
    for one, other in zip(template.reference(**a), template.reference(**flat), strict=True):
        assert torch.equal(one, other)


def test_dit_arguments_are_slices_of_one_buffer():
    for template in norm.fused_dit_gate_residual_layernorm_scale_shift_trace.templates:
        made = template.init(batch_size=2, seq_len=3)
        for name in ("gate", "scale", "shift"):
            assert made[name].stride()[-2:] == (6 * 3072, 1)


ROPE = {"ppf": 2, "pph": 2, "ppw": 3, "num_frame_channels": 4, "num_height_channels": 6, "num_width_channels": 6}
HEADS = {"num_heads_q": 2, "num_heads_k": 1, "num_heads_v": 1, "head_dim": 16}


def rotated(x: list[float], token: int, interleave: bool, factor: float, low: float, high: float) -> list[float]:
    """Rotate one head of one token, element by element, as the contract defines it."""
    dim, (f, h, w) = len(x), (ROPE[f"num_{axis}_channels"] for axis in ("frame", "height", "width"))
    area = ROPE["pph"] * ROPE["ppw"]
    frame, height, width = token // area, token % area // ROPE["ppw"], token % ROPE["ppw"]
    y = []
    for e in range(dim):
        channel = e - e % 2 if interleave else 2 * e % dim
        position, index, count = (
            (frame, channel // 2, f)
            if channel < f
            else (height, (channel - f) // 2, h)
            if channel < f + h
            else (width, (channel - f - h) // 2, w)
        )
        frequency = 10000.0 ** (-2 * index / count)
        if factor != 1:
            top = high + 0.001 if abs(high - low) <= 1e-6 else high
            blend = min(max((index - low) / (top - low), 0.0), 1.0)
            frequency = frequency * (1 - blend) + frequency / factor * blend
        angle = position * frequency
        if interleave:
            partner, sign = (e + 1, -1) if e % 2 == 0 else (e - 1, 1)
        else:
            partner, sign = (e + dim // 2, -1) if e < dim // 2 else (e - dim // 2, 1)
        y.append(x[e] * math.cos(angle) + sign * x[partner] * math.sin(angle))
    return y


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("yarn", [(1.0, 0.0, 0.0, 1.0), (4.0, 0.5, 2.0, 1.25), (4.0, 1.0, 1.0, 0.9)])
@pytest.mark.parametrize("output_fp8", [False, True])
@pytest.mark.parametrize("is_qk_norm", [True, False])
def test_qk_rmsnorm_rope(interleave, yarn, output_fp8, is_qk_norm):
    factor, low, high, attention_factor = yarn
    qkv, weight = rand(2, 12, 4 * 16), rand(32)
    q, k, v = norm.fused_qk_rmsnorm_rope_trace.reference(
        qkv,
        weight,
        weight[:16],
        **ROPE,
        **HEADS,
        interleave=interleave,
        factor=factor,
        low=low,
        high=high,
        attention_factor=attention_factor,
        is_qk_norm=is_qk_norm,
        output_fp8=output_fp8,
        output_quant_scale=2.0,
        v_quant_scale=0.5,
    )
    assert (q.shape, k.shape, v.shape) == ((2, 12, 2, 16), (2, 12, 1, 16), (2, 12, 1, 16))
    x = qkv[..., :32].double()
    if is_qk_norm:
        x = F.rms_norm(x, (32,), weight.double(), 1e-6)  # one statistic over all heads
        x = x if output_fp8 else x.float().to(torch.bfloat16).double()
    exact = [
        [rotated(head.tolist(), t, interleave, factor, low, high) for head in x[b, t].view(2, 16)]
        for b in range(2)
        for t in range(12)
    ]
    expected = torch.tensor(exact).view(2, 12, 2, 16) * attention_factor * (2.0 if output_fp8 else 1.0)
    torch.testing.assert_close(q.float(), expected, rtol=1 / (16 if output_fp8 else 128), atol=1e-2)
    plain_v = qkv[..., 48:].view(2, 12, 1, 16)
    expected_v = (plain_v.float() * 0.5).to(torch.float8_e4m3fn) if output_fp8 else plain_v
    assert torch.equal(v.float(), expected_v.float())


def test_qk_rmsnorm_rope_flat_input_is_the_same():
    qkv, weight = rand(2, 12, 4 * 16), rand(32)
    reference = norm.fused_qk_rmsnorm_rope_trace.reference
    batched = reference(qkv, weight, weight[:16], **ROPE, **HEADS)
    flat = reference(qkv.flatten(0, 1), weight, weight[:16], **ROPE, **HEADS)
    for one, other in zip(batched, flat, strict=True):
        assert torch.equal(one.flatten(0, 1), other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 5)])
def test_scale(dtype, shape):
    x = rand(*shape, dtype=dtype)
    torch.testing.assert_close(scale_trace.reference(x, 3.14), (x.double() * 3.14).to(dtype))


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("op", ["nvfp4", "mxfp4"])
def test_fp4_quantisers_are_undone_by_the_dequantisers(op, swizzled):
    x, layout = rand(ROWS, HIDDEN), 0 if swizzled else 2
    if op == "nvfp4":
        global_scale = 448 * 6 / x.float().abs().amax().reshape(1)
        codes, scales = quantize.nvfp4_quantize_trace.reference(x, global_scale, sfLayout=layout)
        again = quantize.fp4_quantize_trace.reference(x, global_scale, is_sf_swizzled_layout=swizzled)
        assert torch.equal(codes, again[0]) and torch.equal(scales, again[1])
        undo = quantization.e2m1_and_ufp8sf_scale_to_float_trace.reference
        back = undo(codes, scales, 1 / global_scale, is_sf_swizzled_layout=swizzled)
    else:
        codes, scales = quantize.mxfp4_quantize_trace.reference(x, sfLayout=layout)
        back = quantization.mxfp4_dequantize_trace.reference(codes, scales, sfLayout=layout)
    step = x.float().abs().unflatten(1, (-1, 16 if op == "nvfp4" else 32)).amax(dim=-1, keepdim=True)
    error = (back - x.float()).unflatten(1, (-1, 16 if op == "nvfp4" else 32)).abs()
    assert (error <= step * (0.18 if op == "nvfp4" else 0.26)).all()  # half of 4 .. 6; a power of two may double it
    assert torch.equal(back.sign()[x.float().abs() > 1], x.float().sign()[x.float().abs() > 1])


def test_a_block_of_exact_e2m1_values_is_kept():
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 6])
    codes, sf = quantize.nvfp4_kv_quantize_trace.reference(values.reshape(1, 16), torch.ones(1))
    assert (sf.float() == 1).all()
    assert codes.tolist() == [[0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x7F]]
    codes, scales = quantize.mxfp4_quantize_trace.reference(values.repeat(2).reshape(1, 32) / 8, sfLayout=2)
    assert scales.tolist() == [124]  # 2^-3
    assert codes.tolist() == [[0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x7F] * 2]


def test_silu_and_mul_nvfp4_quantize():
    x, scale = rand(ROWS, 2 * HIDDEN), torch.tensor([100.0])
    product = (F.silu(x[:, :HIDDEN].float()) * x[:, HIDDEN:].float()).to(x.dtype)
    expected = quantize.nvfp4_quantize_trace.reference(product, scale)
    for one, other in zip(quantize.silu_and_mul_nvfp4_quantize_trace.reference(x, scale), expected, strict=True):
        assert torch.equal(one, other)


def test_mxfp8_grouped_quantize_is_mxfp8_of_each_group():
    x, mask = rand(2, 130, 96), torch.tensor([130, 3], dtype=torch.int32)
    values, sf = quantize.mxfp8_grouped_quantize_trace.reference(x, mask)
    assert (values.shape, sf.shape) == ((130, 128, 2), (32, 4, 2, 4, 1, 2))
    for group, count in enumerate(mask.tolist()):
        padded = F.pad(x[group, :count], (0, 32))
        expected, scales = quantization.mxfp8_quantize_layout_trace.reference(padded)
        assert torch.equal(values[:count, :, group].view(torch.uint8), expected)
        rows, cols = 128 * (2 - group), 4
        tiles = sf[:, :, : 2 - group, ..., group].permute(2, 4, 0, 1, 3).reshape(-1)  # tile, column, 32, 4, 4
        assert torch.equal(tiles, scales) and scales.numel() == rows * cols


SMALL = {"num_heads": 2, "head_dim_qk": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
SMALL |= {"page_size": 4, "workspace_size": 1, "device": "cpu"}


def test_latent_attention_row_by_row():
    made = latent.trtllm_batch_decode_mla_dense_trace.init(batch_size=2, q_len_per_request=3, num_pages=6, **SMALL)
    made["seq_lens"] = torch.tensor([12, 5], dtype=torch.int32)
    out = latent.trtllm_batch_decode_mla_dense_trace.reference(**made)
    for i, kv_len in enumerate((12, 5)):
        keys = torch.cat([made["kv_cache"].double()[page, 0] for page in made["block_tables"][i]])
        for j in range(3):
            seen = keys[: kv_len - 2 + j]
            weights = torch.softmax(made["query"].double()[i, j] @ seen.T * made["bmm1_scale"], dim=-1)
            torch.testing.assert_close(out[i, j].double(), weights @ seen[:, :16], rtol=1 / 128, atol=1e-3)


def test_forms_of_latent_attention_agree():
    """Compare ragged rows, a table of single tokens and xqa_mla with the dense form, one row for each request."""
    made = latent.trtllm_batch_decode_mla_dense_trace.init(batch_size=2, q_len_per_request=1, num_pages=6, **SMALL)
    expected = latent.trtllm_batch_decode_mla_dense_trace.reference(**made)
    rows = {**made, "query": made["query"][:, 0], "cum_seq_lens_q": torch.arange(3)}
    assert torch.equal(latent.trtllm_batch_decode_mla_ragged_trace.reference(**rows), expected[:, 0])
    slots = (made["block_tables"][:, :, None] * 4 + torch.arange(4)).flatten(1)
    tokens = {"block_tables": F.pad(slots, (0, 3), value=-1)[:, None], "sparse_mla_top_k": 15}
    assert torch.equal(latent.trtllm_batch_decode_mla_sparse_trace.reference(**{**made, **tokens}), expected)
    cache = made["kv_cache"].transpose(1, 2)
    scale, output = made["bmm1_scale"] * math.sqrt(24), torch.empty(2, 1, 2, 16)
    tables = (made["block_tables"], made["seq_lens"])
    out = latent.xqa_mla_trace.reference(made["query"], cache, cache, *tables, output, q_scale=scale)
    torch.testing.assert_close(out, expected)


def test_trtllm_batch_context_is_attention_of_each_prompt():
    sizes = {"num_heads": 4, "head_dim": 16, "page_size": 4, "device": "cpu"}
    made = latent.trtllm_batch_context_trace.init(num_tokens=11, batch_size=2, **sizes)
    out = latent.trtllm_batch_context_trace.reference(**made)
    for i, (begin, end) in enumerate([(0, 5), (5, 11)]):
        pages = made["kv_cache"][made["block_tables"][i].long()].float().transpose(2, 3)
        k, v = (pages[:, half].flatten(0, 1)[: end - begin].repeat_interleave(2, 1).transpose(0, 1) for half in (0, 1))
        rows = made["query"][begin:end].float().transpose(0, 1)
        expected = F.scaled_dot_product_attention(rows, k, v, is_causal=True).transpose(0, 1)
        torch.testing.assert_close(out[begin:end].float(), expected, rtol=1 / 128, atol=1e-3)
