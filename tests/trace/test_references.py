# SPDX-License-Identifier: Apache-2.0
"""The references of all kernels, compared with torch where it has the op, with plain loops elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from flashinfer.trace.templates import norm
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
