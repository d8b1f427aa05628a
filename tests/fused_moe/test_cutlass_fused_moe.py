# SPDX-License-Identifier: Apache-2.0
"""``cutlass_fused_moe`` with 16-bit weights: routing, activations, biases, ranks, buffers."""

from __future__ import annotations

import pytest
import torch

from flashinfer.fused_moe import ActivationType, cutlass_fused_moe, cutlass_fused_moe_workspace_size
from flashinfer.trace.templates.fused_moe import cutlass_fused_moe_trace

from ..graphs import capture
from .layers import BF16, FP16, dense


def largest_terms(call):
    """Return the sum over the top k of the absolute expert outputs, which are rounded before they are added."""
    ids, scales = call["token_selected_experts"], call["token_final_scales"]
    total = 0.0
    for k in range(ids.shape[1]):
        one = {"token_selected_experts": ids[:, k : k + 1].contiguous()}
        one["token_final_scales"] = None if scales is None else scales[:, k : k + 1].contiguous()
        total = total + cutlass_fused_moe_trace.reference(**{**call, **one}).float().abs()
    return total


def check(call, **more):
    """Run a call with poisoned output and compare with the reference, to 1 % of the terms of each sum."""
    call = {**call, **more}
    expected = cutlass_fused_moe_trace.reference(**call)
    output = torch.full_like(expected, torch.nan)
    result = cutlass_fused_moe(**call, output=output)
    assert result[0] is output
    error = (output.float() - expected.float()).abs()
    allowed = 1e-2 + 1e-2 * largest_terms(call)
    assert torch.all(error <= allowed), f"{(error / allowed).max():.2f} of what is allowed"
    return output


#: Tokens, hidden size, intermediate size, experts, top k: one token, tails of tiles, more tokens than a tile, and
#: more pairs than one launch sorts and copies.
SHAPES = [(1, 64, 32, 4, 2), (7, 256, 136, 5, 3), (150, 72, 48, 3, 2), (33, 64, 520, 40, 1), (600, 72, 136, 3, 2)]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("sizes", SHAPES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_shapes(device, dtype, sizes):
    check(dense(*sizes, device, dtype))


@pytest.mark.parametrize("activation", [x for x in ActivationType if x is not ActivationType.InvalidType], ids=str)
def test_activations(device, activation):
    call = dense(6, 64, 48, 3, 2, device, is_gated=activation.is_gated)
    call["input"] *= 4  # so that gates leave the linear part of every activation
    check(call, activation_type=activation)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize(
    "activation, expected",
    [
        (ActivationType.Relu2, [0.0, torch.inf, torch.nan, 4.0]),
        (ActivationType.Relu, [0.0, torch.inf, torch.nan, 2.0]),
        (ActivationType.SwigluBias, [torch.nan, torch.inf, torch.nan, 1.7616]),
        (ActivationType.SwigluStep, [torch.nan, 7.0, torch.nan, 1.7616]),
    ],
    ids=str,
)
def test_activations_of_infinity_and_nan(device, activation, tokens, expected):
    """Check what torch makes of -inf, inf, NaN and 2 as the gate of one hidden value, whose up value is 1."""
    rows = 128 if activation.is_gated else 64
    w1, w2 = torch.zeros(1, rows, 64, device=device), torch.zeros(1, 64, 64, device=device)
    w2[0, 0, 0] = 1
    ids, x = torch.zeros(tokens, 1, dtype=torch.int32, device=device), torch.zeros(tokens, 64, device=device)
    for value, wanted in zip([-torch.inf, torch.inf, torch.nan, 2.0], expected, strict=True):
        bias = torch.zeros(1, rows, device=device)
        bias[0, 0] = 1
        bias[0, rows - 64] = value
        biases = {
            "fc1_expert_biases": bias.bfloat16(),
            "fc2_expert_biases": torch.zeros(1, 64, device=device).bfloat16(),
        }
        call = (x.bfloat16(), ids, None, w1.bfloat16(), w2.bfloat16(), BF16, [])
        out = cutlass_fused_moe(*call, **biases, activation_type=activation)[0][:, 0].float()
        torch.testing.assert_close(out, torch.full_like(out, wanted), rtol=0.01, atol=0, equal_nan=True)


CONSTANTS = [
    (ActivationType.Swiglu, {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 1.5}),
    (ActivationType.Swiglu, {"swiglu_limit": 0.75}),
    (ActivationType.SwigluBias, {"swiglu_beta": 0.5}),
    (ActivationType.SwigluStep, {"swiglu_limit": 0.5}),
    (ActivationType.Situ, {"situ_beta": 0.5, "situ_linear_beta": 1.25}),
]


@pytest.mark.parametrize(
    "activation, constants", CONSTANTS, ids=lambda x: "-".join(x) if isinstance(x, dict) else str(x)
)
def test_constants_of_each_expert(device, activation, constants):
    steps = torch.tensor([1.0, 0.5, 2.0], device=device)
    vectors = {name: steps * value for name, value in constants.items()}
    check(dense(9, 64, 32, 3, 2, device), activation_type=activation, **vectors)


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_biases(device, tp_rank):
    call = dense(6, 64, 32, 3, 2, device)
    biases = {
        "fc1_expert_biases": torch.randn(3, 64, device=device).to(BF16),
        "fc2_expert_biases": torch.randn(3, 64, device=device).to(BF16),
    }
    check(call, **biases, tp_size=2, tp_rank=tp_rank)


@pytest.mark.parametrize("ep_rank", [0, 1, 2])
def test_other_ranks_contribute_nothing(device, ep_rank):
    call = dense(12, 64, 32, 2, 2, device, total=6)
    ids = call["token_selected_experts"]
    ids[0] = -1  # no rank has these experts
    ids[1] = torch.tensor([6, 2**31 - 1], device=device)
    ids[2] = torch.tensor([-(2**31), 2 * ep_rank], device=device)
    out = check(call, ep_size=3, ep_rank=ep_rank)
    assert not out[:2].any()


def test_no_scales(device):
    check(dense(5, 64, 32, 3, 2, device), token_final_scales=None)


@pytest.mark.parametrize("tokens", [3, 90])
def test_skewed_routing(device, tokens):
    call = dense(tokens, 64, 32, 8, 2, device)
    call["token_selected_experts"].fill_(5)  # the others are empty, and both slots have the same expert
    check(call)
    call["token_selected_experts"][: tokens // 2] = 0
    check(call)


@pytest.mark.parametrize("routing", ["any", "one", "ranks"])
def test_many_rows_per_expert(device, routing):
    """GEMM 1 takes its largest tile on SM90."""
    call = dense(2100, 136, 768, 8, 4, device)
    if routing == "one":
        call["token_selected_experts"].fill_(5)  # the others are empty
    elif routing == "ranks":
        call["token_selected_experts"] += 8
        call["token_selected_experts"][::3] = 1  # pairs of another rank
        call |= {"ep_size": 3, "ep_rank": 1}
    first = check(call)
    assert all(torch.equal(cutlass_fused_moe(**call)[0], first) for _ in range(3))


def test_no_tokens(device):
    call = dense(0, 64, 32, 3, 2, device)
    out = cutlass_fused_moe(**call)
    assert [tuple(x.shape) for x in out] == [(0, 64), (1,), (3, 0), (3,)]
    assert [x.dtype for x in out] == [BF16, torch.int32, torch.float32, torch.int32]


def test_results_without_meaning(device):
    """Check that unread results of small calls are allocated once for each size, also for calls in inference mode."""
    sizes = {3: [(1,), (2, 3), (2,)], 5: [(1,), (2, 5), (2,)]}
    for tokens, shapes in sizes.items():
        call = dense(tokens, 64, 32, 2, 1, device)
        with torch.inference_mode():
            first = cutlass_fused_moe(**call)[1:]
        assert [tuple(x.shape) for x in first] == shapes
        assert not any(x.is_inference() for x in first)
        assert all(x is y for x, y in zip(cutlass_fused_moe(**call)[1:], first, strict=True))


def test_strided_input_and_output(device):
    call = dense(5, 64, 32, 3, 2, device)
    wide = torch.zeros(5, 128, dtype=BF16, device=device)
    wide[:, :64] = call["input"]
    out = torch.full((5, 128), 7.0, dtype=BF16, device=device)
    expected = cutlass_fused_moe(**call)[0]
    cutlass_fused_moe(**{**call, "input": wide[:, :64]}, output=out[:, :64])
    assert torch.equal(out[:, :64], expected) and (out[:, 64:] == 7.0).all()


def test_results_are_the_same_bits(device):
    call = dense(70, 64, 48, 4, 2, device)
    first = cutlass_fused_moe(**call)[0]
    assert all(torch.equal(cutlass_fused_moe(**call)[0], first) for _ in range(3))


def test_a_token_does_not_see_the_others():
    """On the CPU: alone, and in a batch where its expert has one row or many."""
    call = dense(120, 256, 136, 3, 2, "cpu")
    call["token_selected_experts"][3:] = torch.tensor([1, 1])
    whole = cutlass_fused_moe(**call)[0]
    for t in (0, 2, 50):
        alone = {name: call[name][t : t + 1] for name in ("input", "token_selected_experts", "token_final_scales")}
        assert torch.equal(cutlass_fused_moe(**{**call, **alone})[0], whole[t : t + 1])


def test_workspace_buffer(device):
    call = dense(9, 64, 32, 4, 2, device)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts_total": 4, "top_k": 2}
    dtypes = {"x_dtype": BF16, "weight_dtype": BF16, "device": device}
    bytes_for = [cutlass_fused_moe_workspace_size(tokens, **sizes, **dtypes) for tokens in range(1, 20)]
    assert bytes_for == sorted(bytes_for) and bytes_for[0] > 0
    buffer = torch.zeros(bytes_for[8], dtype=torch.uint8, device=device)
    assert torch.equal(cutlass_fused_moe(**call, workspace_buffer=buffer)[0], cutlass_fused_moe(**call)[0])
    with pytest.raises(RuntimeError, match="workspace_buffer too small"):
        cutlass_fused_moe(**call, workspace_buffer=buffer[:-1])


def test_compile(device):
    call = dense(5, 64, 32, 3, 2, device)
    dtype = call.pop("output_dtype")
    compiled = torch.compile(lambda **call: cutlass_fused_moe(**call, output_dtype=dtype)[0] + 1, backend="aot_eager")
    assert torch.equal(compiled(**call), cutlass_fused_moe(**call, output_dtype=dtype)[0] + 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_with_changing_routing():
    call = dense(40, 256, 128, 8, 2, "cuda")
    output = torch.empty_like(call["input"])
    graph, _ = capture(lambda: cutlass_fused_moe(**call, output=output))
    for _ in range(3):
        call["token_selected_experts"].copy_(torch.randint(0, 8, (40, 2)))
        graph.replay()
        torch.testing.assert_close(output, cutlass_fused_moe_trace.reference(**call), rtol=1e-2, atol=1e-2)
