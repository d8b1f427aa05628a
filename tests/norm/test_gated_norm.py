# SPDX-License-Identifier: Apache-2.0
"""Gated norms: values, options, what the probes answer."""

from __future__ import annotations

import inspect

import pytest
import torch

import flashinfer.norm as norm
from flashinfer.trace.templates.norm_gated import (
    gated_residual_next_rmsnorm_trace,
    gated_residual_rmsnorm_trace,
    rmsnorm_sigmoid_gate_trace,
)

BF16 = torch.bfloat16


def arguments(rows: int, hidden: int, device: str) -> dict[str, torch.Tensor]:
    return {
        "branch": torch.randn(rows, hidden, device=device).to(BF16),
        "residual": torch.randn(rows, hidden, device=device),
        "alpha": torch.randn(hidden, device=device),
        "beta": torch.randn(hidden, device=device),
    }


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    limit = 1e-5 if got.dtype is torch.float32 else 8e-3
    torch.testing.assert_close(got, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("rows, hidden", [(0, 64), (1, 8), (3, 8192), (5, 1032)])
@pytest.mark.parametrize("gain", [False, True])
def test_gated_residual(device, rows, hidden, gain):
    kw = arguments(rows, hidden, device)
    weight = torch.randn(hidden, device=device).to(BF16) if gain else None
    expected = gated_residual_rmsnorm_trace.reference(**kw, weight=weight, eps=1e-3, gain_center=1.0)
    close(norm.gated_residual_rmsnorm(**kw, weight=weight, eps=1e-3, gain_center=1.0), expected)
    out = kw["residual"]
    assert norm.gated_residual_rmsnorm(**kw, weight=weight, eps=1e-3, gain_center=1.0, out=out) is out
    close(out, expected)


@pytest.mark.parametrize("rows, hidden", [(1, 64), (3, 8192), (5, 1032)])
@pytest.mark.parametrize("is_number", [False, True])
def test_gated_residual_next(device, rows, hidden, is_number):
    kw = arguments(rows, hidden, device)
    kw |= {"next_weight": torch.randn(hidden, device=device).to(BF16), "next_gain_center": 1.0, "next_eps": 1e-3}
    if is_number:
        kw |= {"alpha": 0.5, "post_weight": torch.randn(hidden, device=device).to(BF16), "post_gain_center": 0.5}
    stream, y = gated_residual_next_rmsnorm_trace.reference(**kw)
    got = norm.gated_residual_next_rmsnorm(**kw)
    close(got[0], stream)
    close(got[1], y)
    wide = torch.zeros(rows, hidden + 8, device=device, dtype=BF16)
    again = norm.gated_residual_next_rmsnorm(**kw, ffn_input=wide[:, :hidden])
    assert torch.equal(again[1], got[1]) and not wide[:, hidden:].any()


def test_published_module(device):
    """``norm.kernels.gated_residual_next_rmsnorm`` is a function, and a module that also gives the unrounded norm."""
    from flashinfer.norm import kernels
    from flashinfer.norm.kernels.gated_residual_next_rmsnorm import run

    assert kernels.gated_residual_next_rmsnorm is norm.gated_residual_next_rmsnorm
    assert "router_input" in inspect.signature(run).parameters
    kw, weight = arguments(3, 64, device), torch.randn(64, device=device).to(BF16)
    outputs = [torch.empty(3, 64, device=device, dtype=dtype) for dtype in (torch.float32, BF16)]
    router = torch.empty(3, 64, device=device)
    parts = (kw["branch"], kw["residual"], kw["alpha"], kw["beta"], weight)
    run(*parts, 1e-6, 1e-6, 0.0, *outputs, None, 0.0, router_input=router)
    stream, _ = gated_residual_next_rmsnorm_trace.reference(**kw, next_weight=weight)
    close(outputs[0], stream)
    expected = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    close(router, expected)
    assert torch.equal(outputs[1], router.to(BF16))


@pytest.mark.parametrize("shape", [(0, 64), (5, 64), (3, 7, 64), (700, 16, 64)])
def test_sigmoid_gate(device, shape):
    x, gate = (torch.randn(*shape, device=device).to(BF16) for _ in range(2))
    gate[..., 0] = -200.0  # e^200 is beyond the range
    expected = rmsnorm_sigmoid_gate_trace.reference(x, gate)
    assert norm.rmsnorm_sigmoid_gate(x, gate) is None
    close(x, expected)


def test_sigmoid_gate_of_parts_of_rows(device):
    wide = torch.randn(4, 3, 128, device=device).to(BF16).view(4, 384)
    x, gate, rest = wide[:, :192].view(4, 3, 64), wide[:, 192:].view(4, 3, 64), wide[:, 192:].clone()
    expected = rmsnorm_sigmoid_gate_trace.reference(x, gate)
    norm.rmsnorm_sigmoid_gate(x, gate)
    close(x, expected)
    assert torch.equal(wide[:, 192:], rest)


def test_probes(device):
    kw, weight = arguments(2, 64, device), torch.ones(64, device=device, dtype=BF16)
    good = (kw["branch"], kw["residual"], weight, kw["alpha"], kw["beta"])
    assert norm.supports_gated_residual_rmsnorm(*good)
    assert norm.supports_gated_residual_next_rmsnorm(*good, post_weight=weight)
    assert norm.supports_gated_residual_next_rmsnorm(*good[:3], 0.5, good[4])
    assert not norm.supports_gated_residual_rmsnorm(*good[:3], 0.5, good[4])
    assert not norm.supports_gated_residual_rmsnorm(kw["branch"].float(), *good[1:])
    assert not norm.supports_gated_residual_next_rmsnorm(*good[:2], None, *good[3:])
    assert not norm.supports_gated_residual_rmsnorm(None, 1, "x", [], {})
    assert norm.supports_rmsnorm_sigmoid_gate(BF16, 64) and norm.supports_rmsnorm_sigmoid_gate(BF16, 64, device)
    assert not norm.supports_rmsnorm_sigmoid_gate(BF16, 128) and not norm.supports_rmsnorm_sigmoid_gate(None, 64, "x")
    assert "post_weight" in inspect.signature(norm.supports_gated_residual_next_rmsnorm).parameters


def test_refused(device):
    kw, weight = arguments(2, 64, device), torch.ones(64, device=device, dtype=BF16)
    with pytest.raises(ValueError, match="tensors do not satisfy the gated_residual_rmsnorm contract"):
        norm.gated_residual_rmsnorm(**{**kw, "branch": kw["branch"].float()}, weight=weight)
    with pytest.raises(ValueError, match="tensors do not satisfy the gated_residual_rmsnorm contract"):
        norm.gated_residual_rmsnorm(**{**kw, "beta": kw["beta"][:8]}, weight=weight)
    with pytest.raises(ValueError, match="out must be float32"):
        norm.gated_residual_rmsnorm(**kw, weight=weight, out=kw["branch"])
    for name in ("residual_out", "ffn_input"):
        with pytest.raises(ValueError, match=name):
            norm.gated_residual_next_rmsnorm(**kw, next_weight=weight, **{name: torch.empty(2, 8, device=device)})
    x = torch.zeros(2, 3, 64, device=device, dtype=BF16)
    with pytest.raises(ValueError, match="tensors do not satisfy the rmsnorm_sigmoid_gate contract"):
        norm.rmsnorm_sigmoid_gate(x, x.float())
    with pytest.raises(ValueError, match="packed heads"):
        norm.rmsnorm_sigmoid_gate(x.transpose(0, 1), x.transpose(0, 1))
