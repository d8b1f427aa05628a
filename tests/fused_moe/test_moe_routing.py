# SPDX-License-Identifier: Apache-2.0
"""Routing: methods against their formulas, groups, ties, tables of experts, published names, errors."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer import RoutingMethodType, dsv3_ops
from flashinfer._runtime.errors import ArgumentError
from flashinfer.fused_moe import fused_routing_dsv3, fused_topk_deepseek, hash_topk, route_tokens
from flashinfer.testing import assert_close
from flashinfer.trace.templates.fused_moe_routing import (
    fused_topk_deepseek_trace,
    hash_topk_trace,
    route_tokens_trace,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
METHODS = [method for method in RoutingMethodType if method != RoutingMethodType.Unspecified]


def check_route(logits, top_k, method, **options):
    weights, experts = route_tokens(logits, top_k, method, **options)
    expected, chosen = route_tokens_trace.reference(logits, top_k, method, **options)
    assert weights.dtype == torch.float32 and torch.equal(experts, chosen)
    assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS, ids=lambda x: x.name)
@pytest.mark.parametrize("experts", [5, 128, 600])  # part of a warp; whole registers; most registers
def test_methods(device, method, experts):
    top_k = 1 if method == RoutingMethodType.Llama4 else min(experts, 8)
    check_route(torch.randn(7, experts, device=device), top_k, method)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types_of_logits(device, dtype):
    check_route(torch.randn(9, 64, device=device).to(dtype), 6, RoutingMethodType.Renormalize)


@pytest.mark.parametrize("method", [RoutingMethodType.DeepSeekV3, RoutingMethodType.MiniMax2], ids=lambda x: x.name)
def test_bias_and_factor(device, method):
    """Check that the bias counts for the choice and not for the weight, in place where it is negative."""
    bias = torch.randn(96, device=device) - 1
    check_route(torch.randn(9, 96, device=device), 4, method, bias=bias, routed_scaling_factor=2.5)


def test_ties(device):
    """Check that the smaller number is taken among equals, zeros of both signs included, and NaN last."""
    logits = torch.tensor([[0.0, -0.0, 3.0, 3.0, -1.0], [torch.nan, 1.0, 1.0, torch.nan, -torch.inf]], device=device)
    experts = route_tokens(logits, 4, RoutingMethodType.TopK)[1]
    assert experts.tolist() == [[2, 3, 0, 1], [1, 2, 4, 0]]


# Experts, groups, groups that are kept, top_k: DeepSeek V3, Kimi K2, V2-Lite, groups of one expert.
@pytest.mark.parametrize(
    "experts, n_group, topk_group, topk", [(256, 8, 4, 8), (384, 1, 1, 8), (72, 8, 3, 6), (8, 8, 5, 4)]
)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float16)], ids=str)
def test_deepseek(device, experts, n_group, topk_group, topk, dtypes):
    scores = torch.randn(11, experts, device=device).to(dtypes[0])
    bias = (torch.randn(experts, device=device) - 1).to(dtypes[1])
    values = torch.full((11, topk), torch.nan, dtype=dtypes[0], device=device)
    indices = torch.full((11, topk), -1, dtype=torch.int32, device=device)
    replay = torch.full((13, topk), -7, dtype=torch.int16, device=device)
    arguments = (scores, bias, n_group, topk_group, topk, 2.5)
    # The ninth argument is a flag that one engine passes by position.
    assert fused_topk_deepseek(*arguments, values, indices, True, routing_replay_out=replay) is None
    assert fused_topk_deepseek_trace.check(fused_topk_deepseek_trace.reference(*arguments), (values, indices))
    assert torch.equal(replay[:11].int(), indices) and bool((replay[11:] == -7).all())


def test_deepseek_without_tokens(device):
    values, indices = torch.empty(0, 8, device=device), torch.empty(0, 8, dtype=torch.int32, device=device)
    scores = torch.empty(0, 256, device=device)
    assert fused_topk_deepseek(scores, scores.new_zeros(256), 8, 4, 8, 1.0, values, indices) is None


@pytest.mark.parametrize("score", [-200.0, 200.0, -torch.inf, torch.nan])
def test_deepseek_chooses_experts_whatever_the_scores(device, score):
    """A token whose scores are all alike or none: expert ids are used as addresses, so all are experts, each once."""
    scores = torch.randn(3, 256, device=device)
    scores[1] = score
    values, indices = torch.empty(3, 8, device=device), torch.full((3, 8), -1, dtype=torch.int32, device=device)
    fused_topk_deepseek(scores, torch.zeros(256, device=device), 8, 4, 8, 1.0, values, indices)
    assert all(len(set(row)) == 8 and set(row) <= set(range(256)) for row in indices.tolist())
    assert values[[0, 2]].isfinite().all() and (values[1].isfinite().all() or score != score)


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("tokens", [0, 9])
def test_hash_topk(device, shared, tokens):
    logits = torch.randn(tokens, 64, device=device) * 30  # softplus must not overflow
    ids = torch.randint(0, 50, (tokens,), device=device)
    table = torch.randint(0, 64, (50, 6), device=device, dtype=torch.int32)
    weights, experts = hash_topk(logits, ids, table, shared, 2.5)
    expected, chosen = hash_topk_trace.reference(logits, ids, table, shared, 2.5)
    assert torch.equal(experts, chosen)
    assert_close(weights, expected, rtol=1e-4, atol=1e-6)


def test_published_paths():
    assert dsv3_ops.fused_topk_deepseek is fused_topk_deepseek is fused_routing_dsv3.fused_topk_deepseek
    assert callable(fused_routing_dsv3.get_dsv3_fused_routing_module)
    assert flashinfer.jit.gen_dsv3_fused_routing_module().name == flashinfer.jit.gen_hash_topk_module().name
    assert flashinfer.jit.gen_moe_utils_module().name == "moe_sort"


@pytest.mark.parametrize("top_k, n_group, topk_group", [(8, 8, 1), (5, 4, 1), (9, 4, 2), (16, 16, 15)])
def test_fewer_experts_in_the_chosen_groups_than_slots(device, top_k, n_group, topk_group):
    """Check that nobody chooses an expert that is not there: the CPU wrote before an array."""
    logits, bias, most = torch.randn(4, 16, device=device), torch.zeros(16, device=device), 16 // n_group * topk_group
    text = rf"route_tokens: top_k must be at most topk_group \* \(experts / n_group\) = {most}, got {top_k}"
    with pytest.raises(ArgumentError, match=text):
        route_tokens(logits, top_k, RoutingMethodType.DeepSeekV3, bias, n_group=n_group, topk_group=topk_group)
    _, experts = route_tokens(logits, most, RoutingMethodType.DeepSeekV3, bias, n_group=n_group, topk_group=topk_group)
    assert all(len(set(row)) == most and min(row) >= 0 and max(row) < 16 for row in experts.tolist())


@pytest.mark.parametrize("top_k", [0, -1])
def test_no_slots(device, top_k):
    with pytest.raises(ArgumentError, match=f"route_tokens: top_k must be at least 1, got {top_k}"):
        route_tokens(torch.zeros(3, 8, device=device), top_k)


def test_numbers_that_a_table_does_not_have(device):
    """Check tokens out of the vocabulary and experts out of the layer: nothing behind the tables is read."""
    logits = torch.randn(5, 8, device=device)
    ids = torch.tensor([1, 3, -1, 1 << 40, 2], device=device)
    table = torch.tensor([[0, 1], [2, 3], [8, 5]], dtype=torch.int32, device=device)
    if device == "cpu":
        for change, text in (
            ((ids, table), "input_ids must be from 0 to 2, got 3"),
            ((ids[4:], table), "tid2eid must"),
        ):
            with pytest.raises(ArgumentError, match=f"hash_topk: {text}"):
                hash_topk(logits[: len(change[0])], *change)
        return
    weights, experts = hash_topk(logits, ids, table)
    assert experts.tolist() == [[2, 3], [-1, -1], [-1, -1], [-1, -1], [-1, 5]]
    assert torch.equal(weights[1:4], torch.zeros(3, 2, device=device)) and weights[4].tolist() == [0.0, 1.0]


def test_errors(device):
    scores, bias = torch.zeros(3, 64, device=device), torch.zeros(64, device=device)
    values, indices = torch.zeros(3, 4, device=device), torch.zeros(3, 4, dtype=torch.int32, device=device)
    for n_group, topk_group in ((2, 3), (8, 0), (5, 1), (1, 4), (32, 1)):
        with pytest.raises(ValueError, match="fused_topk_deepseek: Invalid configuration"):
            fused_topk_deepseek(scores, bias, n_group, topk_group, 4, 1.0, values, indices)
    with pytest.raises(ValueError, match=r"routing_replay_out must be int16, got torch\.int32"):
        fused_topk_deepseek(scores, bias, 8, 4, 4, 1.0, values, indices, routing_replay_out=indices)
    with pytest.raises(ValueError, match=r"at least 3 rows and 4 columns, got \(2, 4\)"):
        fused_topk_deepseek(scores, bias, 8, 4, 4, 1.0, values, indices, routing_replay_out=indices[:2].short())
    with pytest.raises(
        ValueError, match=r"fused_topk_deepseek: bias.shape\[0\] must be 64 \(scores.shape\[1\]\), got 63"
    ):
        fused_topk_deepseek(scores, bias[1:], 8, 4, 4, 1.0, values, indices)
    with pytest.raises(ValueError, match="fused_topk_deepseek: topk_indices must be int32, got int64"):
        fused_topk_deepseek(scores, bias, 8, 4, 4, 1.0, values, indices.long())
    with pytest.raises(ValueError, match=r"fused_topk_deepseek: topk_values must be .*, got int32"):
        fused_topk_deepseek(scores, bias, 8, 4, 4, 1.0, values.int(), indices)
    with pytest.raises(ValueError, match=r"route_tokens: logits must be .*, got float64"):
        route_tokens(scores.double(), 2)
    with pytest.raises(ValueError, match=r"backend must be 'default' on this device, got 'cake'"):
        fused_topk_deepseek(scores, bias, 8, 4, 4, 1.0, values, indices, backend="cake")
    with pytest.raises(ValueError, match="top_k must be 1 for Llama4, got 2"):
        route_tokens(scores, 2, RoutingMethodType.Llama4)
    with pytest.raises(ValueError, match="route_tokens: top_k must be from 1 to 32, got 33"):
        route_tokens(scores, 33)
    with pytest.raises(ValueError, match=r"a rule, got RoutingMethodType\.Unspecified"):
        route_tokens(scores, 2, RoutingMethodType.Unspecified)
    with pytest.raises(ValueError, match=r"must be DeepSeekV3 or MiniMax2 with a bias .* got Default"):
        route_tokens(scores, 2, bias=bias)
    ids, table = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(9, 32, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"at most 32, got \(9, 32\) and 1"):
        hash_topk(scores, ids, table, 1)
    with pytest.raises(ValueError, match="routed_scaling_factor must be positive and finite, got inf"):
        hash_topk(scores, ids, table[:, :6].contiguous(), 1, float("inf"))
    with pytest.raises(ValueError, match="hash_topk: tid2eid must be contiguous, got strides"):
        hash_topk(scores, ids, table[:, :6])
    with pytest.raises(ValueError, match=r"hash_topk: input_ids must be int64.*, got int32"):
        hash_topk(scores, ids.int(), table)
    if device == "cpu":  # a GPU does not look
        with pytest.raises(ValueError, match="hash_topk: input_ids must be from 0 to 8, got 9"):
            hash_topk(scores, ids + 9, table)
