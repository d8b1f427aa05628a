# SPDX-License-Identifier: Apache-2.0
"""define_variant on the device, against the reference; tests without a device are in tests/jit."""

from __future__ import annotations

import math

import pytest
import torch

from flashinfer.jit import define_variant

from .inputs import to_layout
from .reference import Attention


def sliding(q_idx, kv_idx, window_size):
    return kv_idx <= q_idx and q_idx - kv_idx < window_size


def capped(logit, q_idx, kv_idx, qo_head_idx, qo_len, kv_len, cap: float, slope=0.05):
    distance = q_idx + kv_len - qo_len - kv_idx
    return cap * math.tanh((logit - slope * (qo_head_idx + 1) * abs(distance)) / cap)


@pytest.fixture
def tensors(device):
    return torch.randn(70, 4, 64, device=device).half(), *torch.randn(2, 200, 2, 64, device=device).half()


def test_a_window_from_python(device, tensors):
    """Check the published use: ``mask_mode="CUSTOM"`` and ``run(q, k, v, window_size=...)``."""
    q, k, v = tensors
    variant = define_variant(mask_mode="CUSTOM", mask_fn=sliding)
    for window_size in (1, 7, 256):  # run-time values for one module
        rows, columns = torch.arange(70, device=device)[:, None], torch.arange(200, device=device)
        mask = (columns <= rows) & (rows - columns < window_size)
        expected, lse = Attention(mask=mask)(q, k, v)
        out, score = variant.run(q, k, v, window_size=window_size, return_lse=True)
        assert out.dtype == q.dtype and out.shape == q.shape
        torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(score, lse, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(variant.reference(q, k, v, window_size=window_size), out, rtol=2e-3, atol=2e-3)
    hidden = variant.run(q, k, v, window_size=0)
    assert (hidden == 0).all()
    with pytest.raises(TypeError, match=r"run: sm_scale must be float.*, got a str"):
        variant.run(q, k, v, window_size=1, sm_scale="1")


def test_logits_and_a_mask_with_the_diagonal(tensors):
    q, k, v = tensors
    variant = define_variant(mask_mode="CAUSAL", mask_fn=lambda q, k, stride=3: (k - q) % stride != 1, logits_fn=capped)
    assert variant.parameters == ("stride", "cap", "slope")
    for options in ({"cap": 5.0}, {"cap": 3, "slope": 0.5, "stride": 2, "sm_scale": 0.3}):
        out = variant.run(q, k, v, **options)
        torch.testing.assert_close(out, variant.reference(q, k, v, **options), rtol=4e-3, atol=4e-3)  # GPU tanh
    again = variant.run(q, to_layout(k, "HND"), to_layout(v, "HND"), kv_layout="HND", **options)
    assert torch.equal(again, out)


def test_sigmoid_attention_from_python(tensors):
    q, k, v = tensors

    def sigmoid(logit, q_idx, kv_idx, bias: float):
        return 1 / (1 + math.exp(-logit - bias))

    for mode in ({}, {"mask_mode": "CAUSAL"}):
        variant = define_variant(logits_fn=sigmoid, use_softmax=False, **mode)
        out = variant.run(q, k, v, bias=-4.0, window_left=90)
        torch.testing.assert_close(out, variant.reference(q, k, v, bias=-4.0, window_left=90), rtol=1e-2, atol=1e-2)
    group = k.repeat_interleave(2, dim=1).float()
    weights = torch.sigmoid(torch.einsum("qhd,khd->hqk", q.float(), group) / 8 - 4.0)
    expected = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, dim=1).float())
    plain = define_variant(logits_fn=sigmoid, use_softmax=False, mask_mode="NON_CAUSAL")
    torch.testing.assert_close(plain.run(q, k, v, bias=-4.0).float(), expected, rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="return_lse must be False"):
        plain.run(q, k, v, bias=-4.0, return_lse=True)
    with pytest.raises(ValueError, match=r"logits_fn must be .* \(use_softmax is False\), got None"):
        define_variant(mask_fn=sliding, use_softmax=False)


def test_logits_alone_run_with_the_kernels_own_masks(tensors):
    q, k, v = tensors
    variant = define_variant(mask_mode="CAUSAL", logits_fn=lambda logit, q, k, slope: logit * 0.5 - k * slope)
    out = variant.run(q, k, v, slope=0.01)
    torch.testing.assert_close(out, variant.reference(q, k, v, slope=0.01), rtol=2e-3, atol=2e-3)
    scaled = Attention(causal=True, window_left=9, sm_scale=0.5 / 8)
    out = variant.run(q, k, v, window_left=9, slope=0.0)
    torch.testing.assert_close(out.float(), scaled(q, k, v)[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(out, variant.reference(q, k, v, window_left=9, slope=0.0), rtol=2e-3, atol=2e-3)


def test_in_compiled_graphs(tensors):
    """Check parameters that are constants or inputs of a graph, and a variant that is created again."""
    variant = define_variant(mask_mode="CAUSAL", mask_fn=lambda q, k, stride: (k - q) % stride != 1, logits_fn=capped)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(q, k, v, stride, cap):
        out, lse = variant.run(q * 1, k, v, stride=stride, cap=cap, slope=0.5, return_lse=True)
        return out * 2, lse + 1, variant.run(q, k, v, stride=2, cap=5.0, window_left=9)

    for stride, cap in ((3, 5.0), (2, 3.0), (7, 4.0)):
        out, lse, windowed = model(*tensors, stride, cap)
        expected = variant.run(*tensors, stride=stride, cap=cap, slope=0.5, return_lse=True)
        assert torch.equal(out, expected[0] * 2) and torch.equal(lse, expected[1] + 1)
        assert torch.equal(windowed, variant.run(*tensors, stride=2, cap=5.0, window_left=9))
