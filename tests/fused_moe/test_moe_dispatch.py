# SPDX-License-Identifier: Apache-2.0
"""Decisions that environment variables change: blocks of the routing kernel, paths of SM12x."""

from __future__ import annotations

import pytest
import torch

from flashinfer.fused_moe import RoutingMethodType, dispatch, route_tokens, routing
from flashinfer.fused_moe.dispatch import B12xPlan, block_tokens, plan_b12x_moe


@pytest.mark.parametrize("value, tokens", [(None, 4), ("1", 1), ("on", 1), ("0", 4), ("off", 4)])
def test_block_per_token(monkeypatch, value, tokens):
    name = "FLASHINFER_ROUTING_FORCE_BLOCK_PER_TOKEN"
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    assert block_tokens() == tokens


def test_routing_passes_the_decision_on(device, monkeypatch):
    """Check that the native call gets the number of tokens, and that results do not depend on it."""
    logits, results = torch.randn(9, 40, device=device), []
    for value in ("0", "1"):
        monkeypatch.setenv("FLASHINFER_ROUTING_FORCE_BLOCK_PER_TOKEN", value)
        seen = []
        native = routing._native_route[device == "cuda"]
        monkeypatch.setitem(
            routing._native_route,
            device == "cuda",
            lambda *args, f=native, seen=seen: (seen.append(args[-1]), f(*args)),
        )
        results.append(route_tokens(logits, 3, RoutingMethodType.Renormalize))
        monkeypatch.setitem(routing._native_route, device == "cuda", native)
        assert seen == [1 if value == "1" else 4]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_paths_of_sm12x(monkeypatch):
    for name in ("FLASHINFER_B12X_MICRO_SHARE_INPUT", "FLASHINFER_B12X_FORCE_MOE_W4A16"):
        monkeypatch.delenv(name, raising=False)
    assert plan_b12x_moe(120, 1) == B12xPlan("nvfp4", share_input=True)
    assert plan_b12x_moe(121, 1000) == B12xPlan("nvfp4", share_input=False)
    assert plan_b12x_moe(120, 8, "w4a16") == B12xPlan("w4a16", share_input=True)
    monkeypatch.setenv("FLASHINFER_B12X_MICRO_SHARE_INPUT", "0")
    assert plan_b12x_moe(120, 1) == B12xPlan("nvfp4", share_input=False)
    monkeypatch.setenv("FLASHINFER_B12X_FORCE_MOE_W4A16", "0")  # any value
    assert plan_b12x_moe(120, 1) == B12xPlan("w4a16", share_input=False)


def test_sm12x_decides_for_its_hardware_only():
    with pytest.raises(ValueError, match="plan_b12x_moe: arch must be 120 or 121, got 90"):
        plan_b12x_moe(90, 1)
    with pytest.raises(ValueError, match="path must be 'nvfp4' or 'w4a16', got 'fp8'"):
        plan_b12x_moe(120, 1, "fp8")
    assert dispatch._BLOCK_TOKENS == 4
