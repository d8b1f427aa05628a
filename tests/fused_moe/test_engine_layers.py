# SPDX-License-Identifier: Apache-2.0
"""Layers as SGLang 0.5.23 makes them on Hopper: checkpoint weights, its preparation, its call, and the model's formula.

Layers of several ranks are summed over the ranks. The references are written from the models' definitions, in float64,
and know nothing of orders of rows, of padding or of scales that are folded.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import pytest
import torch
from torch.nn.functional import pad, silu

from flashinfer import autotune, autotune_v2
from flashinfer.autotuner import AutoTuner
from flashinfer.fused_moe import (
    cutlass_fused_moe,
    fused_topk_deepseek,
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
    preprocess_moe_weights_for_sm90_mixed_gemm_humming,
)
from flashinfer.gemm import tinygemm_bf16
from flashinfer.tllm_enums import ActivationType

from .layers import BF16, E4M3, decode_e2m1, packed

EXPERTS, TOP_K = 8, 4
TOKENS = [1, 3, 17]  # one kernel for one token, few tokens, stages

#: Largest error of a layer over its size. Roundings to bf16 gave 0.003; to e4m3, with 3 bits of mantissa, 0.055 for one
#: token. A wrong constant or half gives 0.1 and more.
OF_BF16, OF_E4M3 = 0.006, 0.08

Activation = Callable[[torch.Tensor, Optional[torch.Tensor]], torch.Tensor]


def route(tokens: int, device: str, top_k: int = TOP_K) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids, int64 as some routers give them, and weights that sum to 1."""
    scores, ids = torch.rand(tokens, EXPERTS, device=device).topk(top_k)
    return ids, scores.softmax(dim=-1)


def formula(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: Optional[torch.Tensor],
    down: torch.Tensor,
    activation: Activation,
    biases: tuple[Any, Any, Any] = (None, None, None),
) -> torch.Tensor:
    """Return the sum over the experts of each token; an id of -1 is none."""

    def product(matrix: torch.Tensor, bias: Optional[torch.Tensor], e: int, column: torch.Tensor) -> torch.Tensor:
        return matrix[e].double() @ column + (0.0 if bias is None else bias[e].double())

    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64, device=x.device)
    for t, row in enumerate(ids.tolist()):
        for slot, e in enumerate(row):
            if e >= 0:
                g = product(gate, biases[0], e, x[t].double())
                u = None if up is None else product(up, biases[1], e, x[t].double())
                out[t] += weights[t, slot].double() * product(down, biases[2], e, activation(g, u))
    return out


def check(out: torch.Tensor, expected: torch.Tensor, most: float) -> None:
    assert out.isfinite().all() and expected.norm() > 0
    assert ((out.double() - expected).norm() / expected.norm()).item() < most


def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Call as SGLang's runner does: into a new output, every argument by keyword."""
    out = torch.full((x.shape[0], arguments["fc2_expert_weights"].shape[1]), torch.nan, dtype=BF16, device=x.device)
    result = cutlass_fused_moe(
        input=x,
        token_selected_experts=ids.to(torch.int),
        token_final_scales=weights.to(torch.float32),
        output_dtype=BF16,
        output=out,
        input_sf=None,
        use_fused_finalize=True,
        **{"tune_max_num_tokens": 8192, "activation_type": ActivationType.Swiglu, **arguments},
    )
    assert result[0] is out
    return out


def each_expert(value: float, device: str) -> torch.Tensor:
    return torch.full((EXPERTS,), value, device=device)


def mxfp4_matrix(n: int, k: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes and exponents as in a checkpoint, and values of the size of random weights of ``k`` columns."""
    codes, exponents = packed(EXPERTS, n, k, device), torch.randint(119, 123, (EXPERTS, n, k // 32), device=device)
    return codes, exponents.to(torch.uint8), decode_e2m1(codes) * torch.exp2(exponents - 127.0).repeat_interleave(32, 2)


def prepare(codes: list[torch.Tensor], exponents: list[torch.Tensor], is_fp8: bool) -> dict[str, Any]:
    """Return the arguments for the weights of both products, with scales as int32 views."""
    names, scales = ("fc1_expert_weights", "fc2_expert_weights"), []
    arguments: dict[str, Any] = {"use_w4_group_scaling": True}
    for name, code, exponent in zip(names, codes, exponents, strict=True):
        if is_fp8:
            arguments[name], scale, residual = preprocess_moe_weights_for_sm90_mixed_gemm_humming(code, exponent)
            scales += [scale.view(torch.int32), (residual * 64.0).contiguous()]
        else:
            arguments[name] = interleave_moe_weights_for_sm90_mixed_gemm(code, "fp4")
            scales.append(interleave_moe_scales_for_sm90_mixed_gemm(exponent, group_size=32).view(torch.int32))
    if is_fp8:
        scales.insert(2, torch.ones((), device=codes[0].device))
        arguments["use_wfp4afp8_humming"] = True
    return {**arguments, "use_mxfp8_act_scaling": False, "quant_scales": scales}


def oai(g: torch.Tensor, u: Optional[torch.Tensor]) -> torch.Tensor:
    """GPT-OSS: (u + 1) g sigmoid(1.702 g) of clamped gates and ups."""
    assert u is not None
    g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
    return (u + 1.0) * g * torch.sigmoid(1.702 * g)


def silu_of_clamped(g: torch.Tensor, u: Optional[torch.Tensor]) -> torch.Tensor:
    """DeepSeek-V4: silu of a clamped gate, times a clamped up."""
    assert u is not None
    return silu(g.clamp(max=0.5)) * u.clamp(-0.5, 0.5)


def clamped_silu(g: torch.Tensor, u: Optional[torch.Tensor]) -> torch.Tensor:
    """Bailing: a clamped silu, times a clamped up."""
    assert u is not None
    return silu(g).clamp(max=0.5) * u.clamp(-0.5, 0.5)


PRECISIONS = pytest.mark.parametrize("is_fp8, most", [(False, OF_BF16), (True, OF_E4M3)], ids=["w4a16", "w4a8"])


@PRECISIONS
@pytest.mark.parametrize("tokens", TOKENS)
def test_padded_layer_with_biases(device, tokens, is_fp8, most):
    """GPT-OSS on three tensor-parallel ranks: 160 columns become 256, 64 rows of each half become 128.

    Gates and ups take turns in the checkpoint. All ranks have a bias for GEMM 2, which counts once. Tokens are large
    enough for the limit of 7.
    """
    hidden, inner, ranks = 160, 192, 3
    codes1, exponents1, values1 = mxfp4_matrix(2 * inner, hidden, device)
    codes2, exponents2, values2 = mxfp4_matrix(hidden, inner, device)
    bias1, bias2 = (torch.randn(EXPERTS, n, device=device).to(BF16) for n in (2 * inner, hidden))
    x, (ids, weights) = (torch.randn(tokens, hidden, device=device) * 4).to(BF16), route(tokens, device)
    total = torch.zeros(tokens, hidden, dtype=torch.float64, device=device)
    own = inner // ranks
    neutral = int(exponents1[0, 0, 0]) if is_fp8 else 0  # exponents of padding must not widen the range of an expert

    def halves(matrix: torch.Tensor, width: int, fill: int = 0) -> torch.Tensor:
        """Return [ups ; gates] of rows that take turns, each half padded."""
        both = (pad(x, (0, width - x.shape[2], 0, 128 - own), value=fill) for x in (matrix[:, 1::2], matrix[:, ::2]))
        return torch.cat(tuple(both), dim=1)

    def second(matrix: torch.Tensor, width: int, fill: int = 0) -> torch.Tensor:
        return pad(matrix, (0, width - matrix.shape[2], 0, 96), value=fill)

    for rank in range(ranks):
        rows = slice(2 * own * rank, 2 * own * (rank + 1))
        codes, exponents = (x.chunk(ranks, dim=2)[rank] for x in (codes2, exponents2))
        up, gate = bias1[:, rows][:, 1::2], bias1[:, rows][:, ::2]
        out = call(
            pad(x, (0, 96)),
            ids,
            weights,
            **prepare(
                [halves(codes1[:, rows], 128), second(codes, 64)],
                [halves(exponents1[:, rows], 8, neutral), second(exponents, 4, neutral)],
                is_fp8,
            ),
            fc1_expert_biases=torch.cat([pad(up, (0, 128 - own)), pad(gate, (0, 128 - own))], dim=1),
            fc2_expert_biases=pad(bias2, (0, 96)),
            swiglu_alpha=each_expert(1.702, device),
            swiglu_beta=each_expert(1.0, device),
            swiglu_limit=each_expert(7.0, device),
            tp_size=ranks,
            tp_rank=rank,
            ep_size=1,
            ep_rank=0,
        )
        assert not out[:, hidden:].any()
        total += out[:, :hidden]
    biases = (bias1[:, ::2], bias1[:, 1::2], bias2)
    check(total, formula(x, ids, weights, values1[:, ::2], values1[:, 1::2], values2, oai, biases), most)


@PRECISIONS
@pytest.mark.parametrize("kind", [ActivationType.Swiglu, ActivationType.SwigluStep], ids=lambda x: x.name)
@pytest.mark.parametrize("tokens", TOKENS)
def test_limits_on_expert_parallel_ranks(device, tokens, kind, is_fp8, most):
    """DeepSeek-V4 and Bailing on four ranks with global ids: a limit is the one constant, padding has no expert."""
    hidden, inner, ranks = 256, 128, 4
    matrices = [mxfp4_matrix(*sizes, device) for sizes in ((inner, hidden), (inner, hidden), (hidden, inner))]
    (gate, gate_exponents, gates), (up, up_exponents, ups), (down, down_exponents, downs) = matrices
    codes, exponents = torch.cat([up, gate], dim=1), torch.cat([up_exponents, gate_exponents], dim=1)
    x, (ids, weights) = torch.randn(tokens, hidden, device=device).to(BF16), route(tokens, device)
    if tokens > 1:
        ids[-1], ids[0, 1] = -1, -1
    total = torch.zeros(tokens, hidden, dtype=torch.float64, device=device)
    for rank in range(ranks):
        own = slice(EXPERTS // ranks * rank, EXPERTS // ranks * (rank + 1))
        total += call(
            x,
            ids,
            weights,
            **prepare([codes[own], down[own]], [exponents[own], down_exponents[own]], is_fp8),
            fc1_expert_biases=None,
            fc2_expert_biases=None,
            swiglu_alpha=None,
            swiglu_beta=None,
            swiglu_limit=each_expert(0.5, device)[own].contiguous(),
            tp_size=1,
            tp_rank=0,
            ep_size=ranks,
            ep_rank=rank,
            activation_type=kind,
        )
    assert tokens == 1 or not total[-1].any()
    activation = silu_of_clamped if kind == ActivationType.Swiglu else clamped_silu
    check(total, formula(x, ids, weights, gates, ups, downs, activation), most)


def to_static(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() / scale).clamp(-448.0, 448.0).to(E4M3)


@pytest.mark.parametrize("tokens", TOKENS)
def test_static_fp8_without_gates(device, tokens):
    """Nemotron-H: relu squared, one scale for all tokens, 24 hidden values padded to 32, a factor afterwards."""
    hidden, inner = 64, 24
    up, down = (torch.randn(EXPERTS, *s, device=device) / s[1] ** 0.5 for s in ((inner, hidden), (hidden, inner)))
    scale1, scale2 = (w.abs().amax(dim=(1, 2)) / 448.0 for w in (up, down))
    up, down = to_static(up, scale1.view(-1, 1, 1)), to_static(down, scale2.view(-1, 1, 1))
    in_scale, hidden_scale = torch.tensor(0.02, device=device), torch.tensor(0.05, device=device)
    x, (ids, weights) = torch.randn(tokens, hidden, device=device).to(BF16), route(tokens, device)
    zeros = torch.zeros(EXPERTS, 8, hidden, device=device).to(E4M3)
    out = call(
        to_static(x, in_scale),
        ids,
        weights,
        fc1_expert_weights=torch.cat([up, zeros], dim=1),
        fc2_expert_weights=torch.cat([down, zeros.transpose(1, 2)], dim=2).contiguous(),
        quant_scales=[scale1 * in_scale, hidden_scale.reciprocal(), hidden_scale * scale2, in_scale],
        swiglu_alpha=None,
        swiglu_beta=None,
        swiglu_limit=None,
        activation_type=ActivationType.Relu2,
        enable_alltoall=False,
    )
    values = (up.float() * scale1.view(-1, 1, 1), None, down.float() * scale2.view(-1, 1, 1))
    expected = formula(x, ids, weights, *values, lambda g, u: torch.relu(g) ** 2)
    check(out.mul_(2.5), 2.5 * expected, OF_E4M3)


@pytest.mark.parametrize("tokens", [0, *TOKENS])
def test_scales_of_tokens_on_the_input(device, tokens):
    """Llama 4 in bf16: the one weight of a token multiplies its input, and scales are 1. Idle ranks have no token."""
    hidden, inner = 64, 48
    gate, up = (torch.randn(EXPERTS, inner, hidden, device=device).to(BF16) / 8 for _ in range(2))
    down = torch.randn(EXPERTS, hidden, inner, device=device).to(BF16) / 8
    x, (ids, _) = torch.randn(tokens, hidden, device=device).to(BF16), route(tokens, device, top_k=1)
    x *= torch.rand(tokens, 1, device=device).to(BF16)
    ones = torch.ones(tokens, 1, device=device)
    with torch.inference_mode():
        weights = {"fc1_expert_weights": torch.cat([up, gate], dim=1), "fc2_expert_weights": down}
        out = call(x, ids, ones, **weights, quant_scales=None, swiglu_limit=None)
    if tokens:
        check(out, formula(x, ids, ones, gate, up, down, lambda g, u: silu(g) * u), OF_BF16)


def test_tuning_with_idle_ranks(tmp_path):
    """The warm-up: both contexts, files by hand, and a tuning range that follows the tokens of each call."""
    hidden, inner = 64, 48
    fc1, fc2 = torch.randn(EXPERTS, 2 * inner, hidden).to(BF16) / 8, torch.randn(EXPERTS, hidden, inner).to(BF16) / 8
    file = tmp_path / "rank.json"

    def layer(tokens: int) -> torch.Tensor:
        x, ids = torch.ones(tokens, hidden, dtype=BF16), torch.arange(tokens * TOP_K).view(tokens, TOP_K) % EXPERTS
        weights = {"fc1_expert_weights": fc1, "fc2_expert_weights": fc2}
        most = 1 << max(tokens - 1, 0).bit_length()
        return call(x, ids, torch.ones(tokens, TOP_K), **weights, quant_scales=None, tune_max_num_tokens=most)

    tuner = AutoTuner.get()
    tuner.clear_cache()
    sizes = (0, 1, 9, 33)
    before = [layer(tokens) for tokens in sizes]
    with autotune(True, cache=None, skip_ops=set()), autotune_v2(mode="tune", persistent_cache=False):
        assert tuner.is_tuning_mode
        inside = [layer(tokens) for tokens in sizes]
    tuner.save_configs(str(file))
    assert not tuner.is_tuning_mode and "trtllm::fused_moe::gemm1" in file.read_text()
    tuner.clear_cache()
    assert tuner.load_configs(str(file))
    after = [layer(tokens) for tokens in sizes]
    tuner.clear_cache()
    for outs in zip(before, inside, after, strict=True):
        assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize("tokens", [0, 5])
def test_groups_of_experts(device, tokens):
    """DeepSeek-V3: all arguments by position, float32 copies of bfloat16 scores, the bias as in the checkpoint."""
    scores, bias = torch.randn(tokens, 256, device=device).to(BF16), torch.randn(256, device=device).to(BF16)
    weights = torch.full((tokens, 8), torch.nan, device=device)
    ids = torch.full((tokens, 8), -7, dtype=torch.int32, device=device)
    assert fused_topk_deepseek(scores.to(torch.float32), bias, 8, 4, 8, 2.5, weights, ids, True) is None
    for t in range(tokens):
        chance = scores[t].double().sigmoid()
        choice = (chance + bias.double()).view(8, 32)
        groups = choice.topk(2).values.sum(dim=1).topk(4).indices
        hidden = torch.full_like(choice, -torch.inf)
        hidden[groups] = choice[groups]
        best = hidden.flatten().topk(8).indices
        assert sorted(ids[t].tolist()) == sorted(best.tolist())
        expected = chance[ids[t].long()] / chance[best].sum() * 2.5
        torch.testing.assert_close(weights[t].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_router_of_few_tokens(device, tokens):
    """GPT-OSS: the router writes into a new tensor; idle ranks have no token."""
    weight, bias = (torch.randn(*s, device=device).to(BF16) for s in ((32, 320), (32,)))
    x = torch.randn(tokens, 320, device=device).to(BF16)
    out = x.new_empty(tokens, 32)
    assert tinygemm_bf16(x, weight, out, bias, use_pdl=True) is None
    if tokens:
        check(out, x.double() @ weight.double().T + bias.double(), OF_BF16)
