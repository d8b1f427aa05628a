# SPDX-License-Identifier: Apache-2.0
"""mono_moe of one token in one kernel: the bits of route_tokens and cutlass_fused_moe, one launch, one native call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer import RoutingMethodType
from flashinfer._runtime.arch import capability_of
from flashinfer.fused_moe import cutlass_fused_moe, mono_moe, monomoe, route_tokens
from flashinfer.trace.templates.monomoe import mono_moe_trace

from ..attention.launches import kernels
from ..graphs import capture
from ..hopper.devices import needs_hopper

METHODS = {
    ("softmax", True): RoutingMethodType.RenormalizeNaive,
    ("softmax", False): RoutingMethodType.Default,
    ("sigmoid", True): RoutingMethodType.SigmoidRenorm,
    ("sigmoid", False): RoutingMethodType.Sigmoid,
}
RULES = list(METHODS)
NAMES = ("out", "x", "logits", "up", "down", "up_scales", "down_scales", "scratchpad", "top_k", "is_sigmoid", "norm")


def layer(tokens: int, experts: int, top_k: int, device: str = "cuda", hidden: int = 256) -> dict[str, Any]:
    sizes = {"num_experts": experts, "hidden_size": hidden, "intermediate_size": 128, "up_rows": 256}
    made = mono_moe_trace.templates[0].init(num_tokens=tokens, device=device, **sizes)
    return {**made, "top_k": top_k}


def composed(call: dict[str, Any], rule: tuple[str, bool]) -> torch.Tensor:
    """Return the result of routing and of the layer with weights [up ; gate], in two calls."""
    up, scales = call["expert_weights_up"], call["expert_scales_up"]
    half, block = up.shape[1] // 2, scales.shape[1] // 2
    swapped = torch.cat((up.view(torch.uint8)[:, half:], up.view(torch.uint8)[:, :half]), dim=1).view(up.dtype)
    weights, experts = route_tokens(call["router_logits"], call["top_k"], METHODS[rule])
    return cutlass_fused_moe(
        call["activations_in"],
        experts,
        weights,
        swapped,
        call["expert_weights_down"],
        torch.bfloat16,
        [torch.cat((scales[:, block:], scales[:, :block]), dim=1), call["expert_scales_down"]],
        use_deepseek_fp8_block_scale=True,
    )[0]


def check(call: dict[str, Any], rule: tuple[str, bool]) -> None:
    out = mono_moe(**call, scoring_func=rule[0], renormalize=rule[1])
    expected = composed(call, rule)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@needs_hopper
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("experts, top_k", [(256, 8), (128, 8), (33, 5), (2, 2), (300, 4), (512, 8)])
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_same_bits(tokens, experts, top_k, rule):
    """Experts fill registers of a lane, a part of them, or shared memory."""
    check(layer(tokens, experts, top_k), rule)


@needs_hopper
@pytest.mark.parametrize(
    "tokens, experts, top_k, hidden", [(1, 1024, 32, 128), (8, 1024, 16, 128), (1, 8, 4, 32768), (1, 1, 1, 128)]
)
def test_limits(tokens, experts, top_k, hidden):
    """The most experts and slots; a wide token; one expert."""
    check(layer(tokens, experts, top_k, hidden=hidden), ("softmax", True))


@needs_hopper
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("tokens, experts", [(1, 100), (1, 320), (8, 320)])
def test_ties_and_logits_that_are_not_finite(tokens, experts, rule):
    call = layer(tokens, experts, 6)
    clean = call["router_logits"]
    special = []
    for value in (torch.nan, torch.inf, -torch.inf):
        some = clean.clone()
        some[-1, [3, 8, experts - 1]] = value
        special += [some, torch.full_like(clean, value)]
    ties = [torch.zeros_like(clean), (clean * 2).round() / 2, clean * 200]
    for logits in (*special, *ties, torch.cat((clean, clean), dim=1)[:, :experts]):  # the last: rows of a wider tensor
        check({**call, "router_logits": logits}, rule)


@needs_hopper
@pytest.mark.parametrize("tokens, hidden, is_one", [(1, 2048, True), (1, 32768, True), (2, 2048, False)])
def test_one_launch(tokens, hidden, is_one):
    """Two tokens are routed by a launch of their own."""
    call = layer(tokens, 8 if hidden > 2048 else 256, 4, hidden=hidden)
    names = kernels(lambda: mono_moe(**call))
    assert (len(names) == 1) == is_one and ("Fp8OneKernel" if is_one else "Fp8FewKernel") in names[-1], names


@needs_hopper
@pytest.mark.parametrize("tokens", [1, 5])
def test_graph_with_changing_routing(tokens):
    call = layer(tokens, 64, 4)
    graph, out = capture(lambda: mono_moe(**call))
    for _ in range(3):
        call["router_logits"].copy_(torch.randn_like(call["router_logits"]))
        graph.replay()
        assert torch.equal(out, composed(call, ("softmax", True)))


@pytest.fixture
def native(monkeypatch):
    """Pretend that CPU tensors are on a Hopper; return a list with the answer of native code, and that of its calls."""
    answers, calls = [True], []
    monkeypatch.setitem(capability_of, -1, 90)
    function = lambda *args: calls.append(dict(zip(NAMES, args, strict=True))) or answers[0]  # noqa: E731
    monkeypatch.setitem(monomoe._native_mono_moe, True, function)
    return answers, calls


@pytest.mark.parametrize("is_given", [False, True])
def test_one_native_call(native, monkeypatch, is_given):
    """Check what native code receives, and that nothing else is called."""
    monkeypatch.delattr(monomoe, "route_tokens")
    call = layer(1, 6, 2, "cpu")
    given = torch.empty(1, 256, dtype=torch.bfloat16) if is_given else None
    pad = torch.zeros(64, dtype=torch.uint8)
    out = mono_moe(**call, scoring_func="sigmoid", renormalize=False, out=given, scratchpad=pad)
    assert out is given or not is_given
    assert out.shape == (1, 256) and out.dtype is torch.bfloat16
    (passed,) = native[1]
    assert passed["out"] is out and passed["x"] is call["activations_in"] and passed["logits"] is call["router_logits"]
    assert passed["down"] is call["expert_weights_down"] and passed["down_scales"] is call["expert_scales_down"]
    assert torch.equal(passed["up"].float()[:, :128], call["expert_weights_up"].float()[:, 128:])
    assert torch.equal(passed["up_scales"], call["expert_scales_up"].flip(1))
    assert passed["scratchpad"] is pad and passed["top_k"] == 2
    assert passed["is_sigmoid"] is True and passed["norm"] is False


def test_layers_that_native_code_does_not_take(native):
    native[0][0] = False
    call = layer(1, 6, 2, "cpu")
    for rule in RULES:
        check(call, rule)
    assert len(native[1]) == len(RULES)


@pytest.mark.parametrize("tokens", [0, 2, 8])
def test_other_numbers_of_tokens(native, tokens):
    """Check that native code is not asked: it takes one token."""
    call = layer(tokens, 6, 2, "cpu")
    for rule in RULES:
        check(call, rule)
    assert native[1] == []


@pytest.mark.parametrize("top_k", [0, 7])
def test_top_k(device, top_k):
    with pytest.raises(ValueError, match=f"mono_moe: top_k must be from 1 to 6, got {top_k}"):
        mono_moe(**layer(3, 6, top_k, device))


def test_output(device):
    with pytest.raises(ValueError, match=r"output must have shape \(3, 256\), got \(2, 256\)"):
        mono_moe(**layer(3, 6, 2, device), out=torch.empty(2, 256, dtype=torch.bfloat16, device=device))
