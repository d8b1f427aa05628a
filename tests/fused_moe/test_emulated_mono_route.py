# SPDX-License-Identifier: Apache-2.0
"""The kernel for one token that routes it, on the CPU (tests/emulation): the bits of routing and layer."""

from __future__ import annotations

import ctypes

import pytest
import torch

from flashinfer import RoutingMethodType
from flashinfer.testing import assert_close
from flashinfer.trace.templates.fused_moe_routing import route_tokens_trace

from ..emulation.build import Library, compile_emulated
from .layers import BF16, fp8_block

SOFTMAX, SIGMOID = 1, 2  # MoeScore of moe/route.h
SCORE, NORMALIZED = 0, 1  # MoeWeight
ALL = [(score, weight) for score in (SOFTMAX, SIGMOID) for weight in (SCORE, NORMALIZED)]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    return compile_emulated("emulated_mono_route.cpp", tmp_path_factory)


def routed(library: Library, logits: torch.Tensor, top_k: int, score: int, weight: int, groups: tuple = (1, 1)):
    """Return experts and weights of the op."""
    tokens, experts = logits.shape
    chosen = torch.full((tokens, top_k), -1, dtype=torch.int32)
    weights = torch.full((tokens, top_k), torch.nan)
    sizes = (logits.stride(0), tokens, experts, top_k, score, weight)
    assert library.call("route", logits.data_ptr(), *sizes, chosen.data_ptr(), weights.data_ptr(), *groups) == 0
    return chosen, weights


@pytest.mark.parametrize("experts, groups", [(5, (1, 1)), (128, (8, 4)), (250, (1, 1)), (512, (16, 3)), (900, (1, 1))])
def test_op(library, experts, groups):
    """The op has the experts of its reference, with ties."""
    logits = (torch.randn(6, experts) * 8).round().div(8).to(BF16)
    top_k, (n_group, topk_group) = min(experts, 7), groups
    method = RoutingMethodType.DeepSeekV3 if n_group > 1 else RoutingMethodType.SigmoidRenorm
    options = {"n_group": n_group, "topk_group": topk_group} if n_group > 1 else {}
    expected, chosen = route_tokens_trace.reference(logits, top_k, method, **options)
    numbers, weights = routed(library, logits, top_k, SIGMOID, NORMALIZED, groups)
    assert torch.equal(numbers, chosen)
    assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def run(library: Library, call: dict, top_k: int, routing: tuple = (0, 0, 0, 0), experts=None, scales=None):
    """Compute a layer whose memory is poisoned with NaN."""
    x, (fc1_scale, fc2_scale) = call["input"], call["quant_scales"]
    fc1, fc2 = call["fc1_expert_weights"], call["fc2_expert_weights"]
    between = torch.full((x.shape[0] * top_k, fc2.shape[2]), torch.nan, dtype=BF16)
    output = torch.full_like(x, torch.nan)
    tensors = (x, fc1, fc2, fc1_scale, fc2_scale, between, output)
    fields = [x.shape[0], top_k, fc1.shape[0], x.shape[1], fc2.shape[2], *(t.data_ptr() for t in tensors)]
    fields += [0 if t is None else t.data_ptr() for t in (experts, scales)]
    packed = (ctypes.c_int64 * (len(fields) + 4))(*fields, *routing)
    assert library.call("layer", ctypes.addressof(packed)) == 0
    return output


def check(library: Library, call: dict, logits: torch.Tensor, top_k: int, score: int, weight: int) -> None:
    """Compare with the layer of a token that the op has routed, bit by bit."""
    experts, scales = routed(library, logits, top_k, score, weight)
    expected = run(library, call, top_k, experts=experts, scales=scales)
    out = run(library, call, top_k, (logits.data_ptr(), logits.stride(0), score, weight))
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("score, weight", ALL)
@pytest.mark.parametrize(
    "top_k, experts",
    [(8, 256), (1, 40), (5, 33), (2, 2), (4, 300), (3, 129), (8, 512)],
    ids=lambda x: str(x),
)
def test_same_bits(library, top_k, experts, score, weight):
    """Logits are a row of a wider tensor."""
    call = fp8_block(1, 48, 16, experts, 1, device="cpu")
    logits = (torch.randn(1, experts + 3) * 3).to(BF16)[:, :experts]
    check(library, call, logits, top_k, score, weight)


@pytest.mark.parametrize(
    "top_k, experts, inner",
    [(32, 1024, 16), (16, 1000, 16), (3, 260, 16), (30, 40, 1024), (1, 1, 16)],
    ids=["most", "not-all", "few", "room", "single"],
)
def test_limits(library, top_k, experts, inner):
    """The most experts and slots; the most operands that there is room for."""
    call = fp8_block(1, 16, inner, experts, 1, device="cpu")
    check(library, call, torch.randn(1, experts).to(BF16), top_k, SOFTMAX, NORMALIZED)


@pytest.mark.parametrize("score, weight", ALL)
@pytest.mark.parametrize("experts", [100, 320])
def test_ties(library, experts, score, weight):
    """Few values, equal values, and logits whose scores are equal because they are 1 or 0."""
    call = fp8_block(1, 16, 16, experts, 1, device="cpu")
    few = torch.randint(-2, 2, (1, experts)).to(BF16)
    large = (torch.randn(1, experts) * 200).to(BF16)
    for logits in (few, torch.zeros_like(few), large):
        check(library, call, logits, 6, score, weight)


@pytest.mark.parametrize("score, weight", ALL)
@pytest.mark.parametrize("experts", [70, 290])
def test_not_finite(library, experts, score, weight):
    """NaN comes last, but for softmax, where one makes all scores NaN; infinities, and a row without a number."""
    call = fp8_block(1, 16, 16, experts, 1, device="cpu")
    clean = torch.randn(1, experts).to(BF16)
    for places, value in (((3, 8, experts - 1), torch.nan), ((5, 6), torch.inf), ((0, 1, 2), -torch.inf)):
        logits = clean.clone()
        logits[-1, list(places)] = value
        check(library, call, logits, 5, score, weight)
    for value in (torch.nan, torch.inf, -torch.inf):
        check(library, call, torch.full_like(clean, value), 5, score, weight)


def test_other_orders_of_threads(library):
    """A choice does not depend on the order in which warps run."""
    call = fp8_block(1, 16, 16, 64, 1, device="cpu")
    logits = torch.randn(1, 64).to(BF16)
    for seed in range(3):
        library.seed(seed)
        check(library, call, logits, 4, SIGMOID, NORMALIZED)
